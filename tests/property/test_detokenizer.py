"""Pieces of text, joined, are the full decode, and never cut a character; stop strings are found wherever they lie."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import pytest
from gateway_fixtures import byte_fallback_backend, byte_level, encode, tokenizer, wrap
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.contract.messages.fields import FinishReason
from gateway.serving.generation import Delta
from gateway.text.choice_text import ChoiceText
from gateway.text.detokenizer import Detokenizer
from gateway.text.stop_strings import StopStrings, StopTables
from gateway.text.tokenizer import ModelTokenizer

BYTE_LEVEL = tokenizer()
BYTE_FALLBACK = wrap(byte_fallback_backend())
BYTES = {
    BYTE_LEVEL.spelling(token_id)[1][0]: token_id
    for token_id in range(BYTE_LEVEL.vocab_size)
    if BYTE_LEVEL.has_text(token_id) and len(BYTE_LEVEL.spelling(token_id)[1]) == 1
}
"""Token ids of single bytes."""

token_sequences = st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=120)
garbage = st.lists(
    st.sampled_from([BYTES[byte] for byte in (0x80, 0xBD, 0xC3, 0xE4, 0xF0, 0x9F, 0xFF, 0x61)]), max_size=400
)
texts = st.text(st.sampled_from("aé日本語😀👩‍👧 \n\ufffdhelo"), max_size=60)


def pieces(model_tokenizer: ModelTokenizer, token_ids: Sequence[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(model_tokenizer)
    return [detokenizer.push(token_id) for token_id in token_ids], detokenizer.flush()


@settings(deadline=None)
@given(token_sequences)
def test_any_tokens_join_to_the_full_decode(token_ids: list[int]) -> None:
    texts_, rest = pieces(BYTE_LEVEL, token_ids)
    assert "".join(texts_) + rest == BYTE_LEVEL.decode(token_ids)


@settings(deadline=None)
@given(garbage)
@example([BYTES[0xFF]] * 1000)
@example([BYTES[0xE4]] * 300 + [BYTES[0xBD], BYTES[0xA0]])
def test_garbage_joins_to_the_full_decode(token_ids: list[int]) -> None:
    texts_, rest = pieces(BYTE_LEVEL, token_ids)
    assert "".join(texts_) + rest == BYTE_LEVEL.decode(token_ids)


@pytest.mark.parametrize("num_garbage", range(60, 70))
@pytest.mark.parametrize("character", ["ß", "日", "🦊"])
def test_a_character_after_garbage_is_whole(num_garbage: int, character: str) -> None:
    token_ids = [BYTES[0xFF]] * num_garbage + [BYTES[byte] for byte in character.encode()]
    texts_, rest = pieces(BYTE_LEVEL, token_ids)
    assert "".join(texts_) + rest == "\ufffd" * num_garbage + character


def test_garbage_is_let_go_of() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    given_out = "".join(detokenizer.push(BYTES[0xFF]) for _ in range(1000))
    assert len(given_out) > 900
    assert len(detokenizer._window) < 100


def test_the_window_stays_short_in_text() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    longest = 0
    for token_id in encode("hello 日本語 😀 wörld. " * 200):
        detokenizer.push(token_id)
        longest = max(longest, len(detokenizer._window))
    assert longest < 30


@settings(deadline=None)
@given(texts.filter(lambda text: "\ufffd" not in text))
def test_every_whole_character_is_given_out_at_once(text: str) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    reference = codecs.getincrementaldecoder("utf-8")()
    for token_id in encode(text):
        assert detokenizer.push(token_id) == reference.decode(BYTE_LEVEL.spelling(token_id)[1])
    assert detokenizer.flush() == ""


@settings(deadline=None)
@given(texts)
def test_text_in_byte_tokens_survives(text: str) -> None:
    token_ids = BYTE_FALLBACK._backend.encode(text, add_special_tokens=False).ids
    texts_, rest = pieces(BYTE_FALLBACK, token_ids)
    assert "".join(texts_) + rest == BYTE_FALLBACK.decode(token_ids)


@settings(deadline=None)
@given(st.text(st.sampled_from("aé日😀 \nhelo"), min_size=1, max_size=30), st.data())
def test_what_continues_a_text_joins_to_the_decode_of_both(text: str, data: st.DataObject) -> None:
    """Also the space before its first word."""
    for model_tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        token_ids = model_tokenizer._backend.encode(text, add_special_tokens=False).ids
        cut = data.draw(st.integers(1, len(token_ids)))
        before, after = token_ids[:cut], token_ids[cut:]
        detokenizer = Detokenizer(model_tokenizer, before)
        continued = "".join(detokenizer.push(token_id) for token_id in after) + detokenizer.flush()
        beginning = model_tokenizer.decode(before)
        if not beginning.endswith("\ufffd"):
            assert beginning + continued == model_tokenizer.decode(token_ids)
        else:
            assert continued == model_tokenizer.decode(after)


@pytest.mark.parametrize("num_characters", [2, 3, 4, 5])
def test_what_continues_characters_in_byte_tokens_keeps_its_space(num_characters: int) -> None:
    """The last tokens of the text may begin inside a character."""
    backend = BYTE_FALLBACK._backend
    before = backend.encode("日" * num_characters, add_special_tokens=False).ids
    after = backend.encode(" h", add_special_tokens=False).ids
    detokenizer = Detokenizer(BYTE_FALLBACK, before)
    assert "".join(map(detokenizer.push, after)) + detokenizer.flush() == " h"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_stays_incomplete_ends_as_in_the_full_decode(cut: int) -> None:
    token_ids = [*encode("ab"), *(BYTES[byte] for byte in "😀".encode()[:cut])]
    texts_, rest = pieces(BYTE_LEVEL, token_ids)
    assert "".join(texts_) == "ab"
    assert rest == "\ufffd"
    assert "ab" + rest == byte_level().decode(token_ids)


@pytest.mark.parametrize("cut", range(4, 9))
def test_an_incomplete_character_takes_no_earlier_one_along(cut: int) -> None:
    """The decoder writes U+FFFD for each byte of a run with a byte that fits into no character."""
    byte_tokens = [BYTE_FALLBACK._backend.token_to_id(f"<0x{byte:02X}>") for byte in "😀😀".encode()]
    texts_, rest = pieces(BYTE_FALLBACK, byte_tokens[:cut])
    assert "".join(texts_) + rest == ("😀😀" if cut == 8 else "😀" + "\ufffd" * (cut - 4))


def test_a_stray_byte_changes_nothing_before_it_nor_behind_it() -> None:
    backend = BYTE_FALLBACK._backend
    word = backend.encode("hello", add_special_tokens=False).ids
    stray = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "漢字漢字".encode() + b"\xff"]
    texts_, rest = pieces(BYTE_FALLBACK, [*word, *stray, *word])
    assert "".join(texts_) + rest == "hello漢字漢字\ufffd hello"


def naive(text: str, stops: list[str], num_free: int = 0) -> tuple[str, str | None]:
    """The definition: the first character at which the text so far ends with a stop string, the longest of them. It is
    none of the first `num_free`. Returns the text before that, and the stop string."""
    for end in range(num_free + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(deadline=None)
@given(
    st.lists(st.text("abc", max_size=4), max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=6), max_size=4),
    st.integers(0, 20),
)
@example(["aab", "aab", "aac"], ["aabaac"], 0)
@example(["abcd"[:3]], ["abc", "bc"], 0)
@example(["a", "b"], ["ab"], 1)
@example(["aa", "a"], ["aa"], 1)
def test_stop_strings_match_the_naive_search(parts: list[str], stops: list[str], num_free: int) -> None:
    """Also where the first `num_free` parts can complete none."""
    finder = StopStrings(StopTables(stops))
    out, seen = "", ""
    stop: str | None = None
    for number, part in enumerate(parts):
        passed, stop = finder.push(part, may_end=number >= num_free)
        out, seen = out + passed, seen + part
        if stop is not None:
            break
        held = len(seen) - len(out)
        possible = [n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])]
        assert held == max(possible, default=0), "held back exactly what may begin a stop string"
    if stop is None:
        out += finder.flush()
    assert (out, stop) == naive("".join(parts), stops, len("".join(parts[:num_free])))


@settings(deadline=None)
@given(
    token_ids=st.lists(
        st.sampled_from(
            [*encode("hello 日本語 😀 the end"), *(BYTES[byte] for byte in b"helo"), BYTES[0xE4], BYTES[0xFF], 0]
        ),
        min_size=1,
        max_size=40,
    ),
    stops=st.lists(
        st.sampled_from(["hel", "lo", "lolo", "本語", "😀 t", "\ufffd", "o 日", "d", " the en"]),
        max_size=3,
        unique=True,
    ),
    tokens_per_delta=st.integers(1, 5),
    finish_reason=st.sampled_from(["stop", "length"]),
    min_tokens=st.sampled_from([0, 0, 1, 3]),
)
@example(token_ids=[BYTES[0x6C], BYTES[0x6F]], stops=["lo"], tokens_per_delta=1, finish_reason="length", min_tokens=1)
def test_a_choice_ends_at_its_first_stop_string(
    token_ids: list[int], stops: list[str], tokens_per_delta: int, finish_reason: FinishReason, min_tokens: int
) -> None:
    """The token that ends it otherwise, unless by its length, is no text."""
    choice = ChoiceText(0, BYTE_LEVEL, StopTables(stops), min_tokens, eos_token_id=BYTES[0x6F])
    out, num_tokens, reason, stop_reason = "", 0, None, None
    for start in range(0, len(token_ids), tokens_per_delta):
        part = tuple(token_ids[start : start + tokens_per_delta])
        last = start + tokens_per_delta >= len(token_ids)
        piece = choice.push(
            Delta(choice=0, token_ids=part, logprobs=None, finish_reason=finish_reason if last else None)
        )
        out, num_tokens = out + piece.text, num_tokens + piece.num_tokens
        reason, stop_reason = piece.finish_reason, piece.stop_reason
        if choice.ended:
            break

    settled, rest = pieces(BYTE_LEVEL, token_ids[:-1] if finish_reason == "stop" else token_ids)
    whole = "".join(settled) + rest
    num_free = len("".join(settled[:min_tokens])) if len(token_ids) > min_tokens else len(whole)
    text, stop = naive(whole, stops, num_free)
    ends = [count for count in range(len(settled) + 1) if naive("".join(settled[:count]), stops, num_free)[1]]
    assert out == text
    assert reason == (finish_reason if stop is None else "stop")
    by_token = token_ids[-1] if finish_reason == "stop" and token_ids[-1] != BYTES[0x6F] else None
    assert stop_reason == (by_token if stop is None else stop)
    assert num_tokens == (ends[0] if ends else len(token_ids))
