"""The model's tokenizer and chat template, as `transformers` loads them, without what the gateway must not load.

Encoding and decoding go straight to the Rust tokenizer behind the `transformers` object: it may be used from several
threads at once, lets go of the interpreter lock while it encodes, and never tidies up spaces in decoded text, which
text that is already sent could not follow.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jinja2 import TemplateError
from tokenizers import AddedToken

from common.contract.errors import BatonError, OperatorError
from gateway.bounded_threads import BoundedThreads
from gateway.text.detokenizer import TokenDecoder
from gateway.text.plain_text import Marker

_THREAD_CHARS = 2048
"""Text from this size on, half a millisecond's work, is encoded in a thread; the way there and back takes a fifth of
that."""
_NUM_THREADS = 4
_SLICE_CHARS = 2**14
"""What is counted by itself, before a long text is encoded."""
_SURE_BYTES_PER_TOKEN = 6
"""A text with at most so many bytes for each token that it may have is encoded at once: hardly any has more of them to
a token, and what encoding takes is bounded by it."""
_LARGE_BYTES = 2**18
"""From this size on texts are encoded one at a time, for each takes up to 200 times its size meanwhile; and what that
leaves behind is given back to the system."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_UNSETTLED = "�"
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""What a template may run into: the sandbox's `range` has at most 100,000 items, and says so with `OverflowError`."""
_TEMPLATE_NAMES = frozenset(
    {"messages", "raise_exception", "strftime_now", "namespace", "dict", "range", "self", "conversations"}
)
"""What `transformers` gives to every template, beside special tokens and the options of rendering."""


PromptEnding: TypeAlias = Literal["answer", "message", "nothing"]
"""What a conversation is left open for: the assistant's turn, more of the last message, or whatever comes."""


class ChatTemplateError(BatonError):
    """The model's chat template does not take these messages, or the model has none."""


class TextTooLong(BatonError):  # noqa: N818 (what is wrong is the text)
    """A text has more tokens than it may have; how many was not counted to the end."""


def keep_torch_out() -> None:
    """Make torch impossible to import in this process, so that `transformers` loads only its tokenizers.

    `transformers` imports torch wherever it finds it, which in a gateway costs seconds and hundreds of MB; with this,
    a gateway beside an engine is the same as one in an image that has no torch. To be called before anything imports
    `transformers`.
    """
    assert sys.modules.get("torch") is None, "torch is already loaded"
    sys.modules["torch"] = None  # type: ignore[assignment]  # the documented way to make an import fail
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


class ModelTokenizer:
    """Text to tokens and back, for one model."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a `transformers` tokenizer with a Rust backend, and belongs to this object from now on."""
        self._templates = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        """One more than the largest token id, added tokens included."""
        added = self._backend.get_added_tokens_decoder()
        self._added = {token.content: index for index, token in added.items()}
        special = {index for index, token in added.items() if token.special}
        self._with_text = frozenset(vocabulary.values()) - special
        self._rendering_options = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        self._marker = Marker([token.content for token in added.values() if token.special])
        self._marking: Any = None
        """The backend that knows marks, once one was needed."""
        self._spellings: dict[int, tuple[str, bytes]] = {}
        self._longest_bytes = max(len(token.encode()) for token in vocabulary)
        """Of any token, as the vocabulary spells it: at least as many as it stands for."""
        self.threads = BoundedThreads(_NUM_THREADS, "tokenizer")
        """Where long texts are worked on."""
        self._large = BoundedThreads(1, "tokenizer-large")
        """Where very long ones are."""

    @classmethod
    def load(cls, folder: Path) -> ModelTokenizer:
        """Load the tokenizer of the checkpoint in `folder`; nothing is fetched.

        Raises `OperatorError` if there is none that can be used.
        """
        from transformers import AutoTokenizer  # after `keep_torch_out`

        try:
            # Without the last word on remote code a person at a terminal is asked, and code of the checkpoint runs.
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # what the libraries raise over a malformed file is of a dozen unrelated types
            raise OperatorError(f"cannot load a tokenizer from {folder}: {error}") from error
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise OperatorError(f"the tokenizer in {folder} has no fast form (tokenizer.json)")
        return cls(tokenizer)

    def least_tokens(self, text: str) -> int:
        """So many tokens the text has at least, by its length alone."""
        return -(-len(self._marker.unmarked(text).encode()) // self._longest_bytes)

    async def encode(self, text: str, at_most: int | None = None) -> list[int]:
        """The tokens of a prompt, with the special tokens that the model puts around a text.

        Raises `TextTooLong` instead of encoding what has clearly more than `at_most` tokens; near that number there is
        no telling without.
        """
        return await self._encode(text, at_most, add_special_tokens=True)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        switches: Mapping[str, Any] | None = None,
        ending: PromptEnding = "answer",
    ) -> str:
        """A conversation as the model reads it, up to where the assistant is to speak; or, by `ending`, up to the end
        of the last message's text, or of its turn.

        `tools` are the functions that the model is told of, `switches` further variables of its chat template, each of
        which `takes_switch`. Special tokens that are spelt in any of these have marks inside, which `encode_rendered`
        knows. Raises `ChatTemplateError`.
        """
        if self._templates.chat_template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        try:
            text: str = self._templates.apply_chat_template(
                self._marker.marked(messages),
                tools=self._marker.marked(tools) or None,
                tokenize=False,
                add_generation_prompt=ending == "answer",
                continue_final_message=ending == "message",
                **self._marker.marked(switches or {}),
            )
            text.encode()
        except _TEMPLATE_ERRORS as error:
            why = self._marker.unmarked(str(error))
            raise ChatTemplateError(f"the model's chat template does not take these messages: {why}") from error
        return text

    async def encode_rendered(self, text: str, at_most: int | None = None) -> list[int]:
        """The tokens of a conversation that `render_chat` has written: no special token is added to its own, and what
        clients spell as one is text.

        Raises as `encode` does.
        """
        return await self._encode(text, at_most, add_special_tokens=False)

    def chat_template(self, with_tools: bool) -> str:
        """The model's chat template for conversations with functions, or without; empty if there is none."""
        template = self._templates.chat_template
        if isinstance(template, Mapping):
            template = (template.get("tool_use") if with_tools else None) or template.get("default")
        return template or ""

    def takes_switch(self, name: str) -> bool:
        """Whether a client may set this variable of the chat template: it is nobody else's."""
        special = name.endswith("_token") or name in self._templates.special_tokens_map
        taken = name in _TEMPLATE_NAMES or name in self._rendering_options or name.startswith("_")
        return name.isidentifier() and not special and not taken

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, without special tokens."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens spelt out."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text

    def spelling_out(self, markers: Iterable[str]) -> TokenDecoder:
        """A decoder that gives the text of these special tokens, too, where they are some."""
        marked = {self._added[marker] for marker in markers if marker in self._added} - self._with_text
        return _SpellingOut(self, frozenset(marked)) if marked else self

    def spelling_all(self) -> TokenDecoder:
        """A decoder that gives the text of every special token, too."""
        return self.spelling_out(self._added)

    def added_token(self, text: str) -> int | None:
        """The token that was added to the vocabulary for this text, special or not, if there is one."""
        return self._added.get(text)

    def has_text(self, token_id: int) -> bool:
        """Whether `decode` gives something for this token: it is in the vocabulary, and not special."""
        return token_id in self._with_text

    def spelling(self, token_id: int) -> tuple[str, bytes]:
        r"""A token by itself, for reports of log probabilities: a name and its bytes.

        The name is the token's text; of a token that is no whole text it is `bytes:` and the bytes as `\x..`.
        """
        known = self._spellings.get(token_id)
        if known is None:
            known = self._spellings[token_id] = self._spell(token_id)
        return known

    async def _encode(self, text: str, at_most: int | None, *, add_special_tokens: bool) -> list[int]:
        marked = self._marker.mark in text
        if len(text) < _THREAD_CHARS and not marked:
            return self._encode_whole(text, add_special_tokens)
        num_bytes = len(text.encode())

        def encode() -> list[int]:
            try:
                if at_most is not None and num_bytes > _SURE_BYTES_PER_TOKEN * at_most:
                    self._refuse_clearly_too_long(self._marker.unmarked(text), at_most)
                return self._encode_marked(text) if marked else self._encode_whole(text, add_special_tokens)
            finally:
                if num_bytes >= _LARGE_BYTES:
                    _give_memory_back()

        return await (self.threads if num_bytes < _LARGE_BYTES else self._large).run(encode)

    def _encode_whole(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch form is the one that lets go of the interpreter lock.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids

    def _encode_marked(self, text: str) -> list[int]:
        """The tokens of a conversation in which clients have spelt special tokens. Beside a mark there are seams, as
        beside any added token."""
        if self._marking is None:
            marking = copy.deepcopy(self._backend)
            marking.add_tokens([AddedToken(self._marker.mark, normalized=False)])
            self._marking = marking
        mark = self._marking.token_to_id(self._marker.mark)
        (encoding,) = self._marking.encode_batch_fast([text], add_special_tokens=False)
        return [token for token in encoding.ids if token != mark]

    def _refuse_clearly_too_long(self, text: str, at_most: int) -> None:
        """Count in slices. A token or two at each of their seams are not those of the whole text, so that what is not
        far beyond `at_most` passes."""
        enough = at_most + at_most // 4 + _THREAD_CHARS
        num_tokens = 0
        for start in range(0, len(text), _SLICE_CHARS):
            (encoding,) = self._backend.encode_batch_fast(
                [text[start : start + _SLICE_CHARS]], add_special_tokens=False
            )
            num_tokens += len(encoding)
            if num_tokens > enough:
                raise TextTooLong(f"more than {at_most} tokens")

    def _spell(self, token_id: int) -> tuple[str, bytes]:
        raw: str | None = self._backend.id_to_token(token_id)
        if raw is None:
            return "", b""
        text = self.decode_all([token_id])
        if _UNSETTLED not in text:
            if raw.startswith("▁") and not text.startswith(" "):  # a decoder drops the space before the first word
                text = " " + text
            return text, text.encode()
        if match := _BYTE_TOKEN.fullmatch(raw):
            content = bytes.fromhex(match[1])
        elif all(char in _BYTE_OF_CHAR for char in raw):
            content = bytes(_BYTE_OF_CHAR[char] for char in raw)
        else:
            return text, text.encode()
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content


class _SpellingOut:
    """A decoder for which some special tokens have text."""

    def __init__(self, tokenizer: ModelTokenizer, marked: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._marked = marked

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, each of which `has_text`."""
        return self._tokenizer.decode_all(token_ids)

    def has_text(self, token_id: int) -> bool:
        """Whether `decode` gives something for this token."""
        return token_id in self._marked or self._tokenizer.has_text(token_id)


def _give_memory_back() -> None:
    """Threads keep what they have freed, each a heap of its own: hundreds of MB after one long text."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _byte_alphabet() -> dict[str, int]:
    """How byte-level BPE spells bytes (GPT-2): visible Latin-1 as itself, the others from U+0100 on, in order."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
