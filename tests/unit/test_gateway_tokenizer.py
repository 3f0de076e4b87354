"""The tokenizer as `transformers` has it, without torch, and without holding up the event loop."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from gateway_fixtures import BOS, CHAT_TEMPLATE, byte_fallback_backend, byte_level_backend, encode, tokenizer, wrap
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, tokenization_utils_tokenizers
from transformers.models.auto import tokenization_auto

from common.contract.errors import OperatorError
from gateway.api_settings import SamplingDefaults
from gateway.text.tokenizer import ChatTemplateError, ModelTokenizer

MESSAGES = [{"role": "user", "content": "hello 日本"}]

WITHOUT_TORCH = """
import asyncio, sys
from pathlib import Path
from gateway.text.tokenizer import ModelTokenizer, keep_torch_out
import gateway.api
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "triton", "nixl", "transformers")]
keep_torch_out()
tokenizer = ModelTokenizer.load(Path(sys.argv[1]))
token_ids = asyncio.run(tokenizer.encode("hello"))
chat = tokenizer.render_chat([{"role": "user", "content": "hello"}])
chat_ids = asyncio.run(tokenizer.encode(chat, add_special_tokens=False))
assert tokenizer.decode(token_ids) == "hello", token_ids
assert token_ids.count(0) == chat_ids.count(0) == 1
loaded = [name for name, module in sys.modules.items() if module is not None]
assert not [name for name in loaded if name.split(".")[0] in ("torch", "triton", "nixl", "kv_transfer")]
assert not [name for name in loaded if name.startswith("common.engine")]
try:
    import torch
except ModuleNotFoundError:
    print("no torch")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's tokenizer, as `transformers` writes it."""
    path = tmp_path_factory.mktemp("checkpoint")
    PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(path)
    return path


@pytest.mark.processes
def test_no_torch_in_the_gateway(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "no torch\n"
    assert run.stderr == ""


async def test_it_agrees_with_transformers(folder: Path) -> None:
    loaded, reference = ModelTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in ["", "hello", "hello 日本 </s> 😀", "a" * 50_000]:
        token_ids = await loaded.encode(text)
        assert token_ids == reference(text)["input_ids"]
        assert loaded.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)
        assert loaded.decode_all(token_ids) == reference.decode(token_ids)
    chat = reference.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert await loaded.encode(loaded.render_chat(MESSAGES), add_special_tokens=False) == chat
    assert chat.count(BOS) == 1
    assert loaded.vocab_size == len(reference)


async def test_truncation_and_padding_of_the_file_do_not_count() -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert await wrap(backend).encode("hello the end of the story") == [BOS, *encode("hello the end of the story")]


async def test_long_text_does_not_hold_up_the_loop() -> None:
    task = asyncio.create_task(tokenizer().encode("the quick brown fox " * 20_000))
    num_turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert len(await task) > 20_000
    assert num_turns > 20, "the loop stands still, or nearly, while the interpreter lock is held"


def test_templates_that_do_not_fit() -> None:
    with pytest.raises(ChatTemplateError, match="unknown role wizard"):
        tokenizer().render_chat([{"role": "wizard", "content": "a"}])
    for template in [
        "{{ messages[5]['role'] }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.of.this }}",
        "{% broken",
        "{{ range(10**9) }}",
        "{{ 1 / 0 }}",
        "{{ 10**400 * 1.5 }}",
    ]:
        with pytest.raises(ChatTemplateError):
            wrap(byte_level_backend(), template).render_chat(MESSAGES)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        wrap(byte_level_backend(), None).render_chat(MESSAGES)


def test_what_cannot_be_loaded_is_the_operators_to_mend(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"nowhere has no tokenizer\.json"):
        ModelTokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(OperatorError, match="cannot load a tokenizer"):
        ModelTokenizer.load(tmp_path)


@pytest.mark.parametrize("other", ["tekken.json", "tokenizer.model", "vocab.json"])
def test_a_folder_without_tokenizer_json_is_refused(tmp_path: Path, other: str) -> None:
    """What `transformers` makes of other files may lack parts."""
    config: dict[str, object] = {"model_type": "mistral", "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / other).write_text("{}")
    with pytest.raises(OperatorError, match=r"has no tokenizer\.json: put the one of the model's family there"):
        ModelTokenizer.load(tmp_path)


def test_a_chat_template_in_a_file_replaces_the_models_own(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_bytes("{% for m in messages %}[{{ m.role }}] é {{ m.content }}{% endfor %}\n{# tools #}".encode())
    loaded = ModelTokenizer.load(folder, path)
    assert loaded.render_chat(MESSAGES) == "[user] é hello 日本"
    assert "tools" in loaded.chat_template(with_tools=True)
    path.write_text("{{ raise_exception('it wants a system message') }}")
    with pytest.raises(ChatTemplateError, match="it wants a system message"):
        ModelTokenizer.load(folder, path).render_chat(MESSAGES)


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "cannot read .*No such file"), (b"\xff", "cannot read"), (b"a\n{% broken", r"template\.jinja, line 2: ")],
)
def test_a_file_that_is_no_chat_template_is_the_operators_to_mend(
    folder: Path, tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "template.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OperatorError, match=f"--chat-template: .*{why}"):
        ModelTokenizer.load(folder, path)


def test_code_of_a_checkpoint_is_not_run_whatever_a_person_at_the_terminal_would_say(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`transformers` asks, where it is not told."""
    ran = tmp_path / "ran"
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "mine.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Mine: pass\n")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with suppress(OperatorError):
        ModelTokenizer.load(model)
    assert not ran.exists()


TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WRONG = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
"""A pattern in the manner of the conversions that `transformers` suspects."""
ACROSS = "oW"
"""A token that reaches over the border of two of tekken's words, but of no word of `WRONG`, in `CAMEL`."""
CAMEL = "helloWorld"


def mistral_folder(
    path: Path, pattern: str | None, num_tokens: int = 100_100, tekken: object = None, **stated: object
) -> Path:
    """A Mistral checkpoint's files for the gateway. `pattern` splits texts; None: as tokenizers made from SentencePiece
    do. `stated` goes into its `tokenizer_config.json`."""
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), ACROSS, "▁"]
    words += (f"<filler {number}>" for number in range(num_tokens - len(words)))
    backend = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [("o", "W")]))
    backend.decoder = decoders.ByteLevel()
    split: pre_tokenizers.PreTokenizer = pre_tokenizers.Metaspace(split=False)
    if pattern is not None:
        first = pre_tokenizers.Split(Regex(pattern), "isolated")
        split = pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.pre_tokenizer = split
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    files: dict[str, object] = {
        "config.json": {"model_type": "mistral", "transformers_version": "4.49.0", "vocab_size": num_tokens},
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", **stated},
    }
    if tekken is not None:
        files["tekken.json"] = tekken
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `transformers` warns of."""
    said: list[str] = []
    monkeypatch.setattr(tokenization_utils_tokenizers.logger, "warning", lambda text, *_: said.append(text))
    return said


async def crosses(folder: Path) -> bool:
    """Whether `CAMEL` is one word."""
    loaded = ModelTokenizer.load(folder)
    token_ids = await loaded.encode(CAMEL)
    assert loaded.decode(token_ids) == CAMEL
    return ACROSS in spelt(loaded, token_ids)


def spelt(loaded: ModelTokenizer, token_ids: list[int]) -> list[str]:
    return [loaded.spelling(token_id)[0] for token_id in token_ids]


async def test_tokenizer_json_goes_before_mistrals_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `mistral_common` is installed, as it is beside vLLM, `transformers` by itself takes the other one."""
    folder = mistral_folder(tmp_path, TEKKEN, 300, tekken={"config": {"pattern": TEKKEN}})
    monkeypatch.setattr("transformers.integrations.mistral.tokenizer.is_mistral_common_available", lambda: True)
    monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING_NAMES, "mistral", "MistralCommonBackend")
    assert tokenization_auto._use_mistral_format(folder)
    assert not await crosses(folder)


async def test_a_wrong_split_is_mended_where_tekken_json_has_the_right_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, warnings: list[str]
) -> None:
    caplog.set_level("INFO")
    folder = mistral_folder(tmp_path, WRONG, tekken={"config": {"pattern": TEKKEN}})
    loaded, reference = ModelTokenizer.load(folder), AutoTokenizer.from_pretrained(folder, fix_mistral_regex=True)
    assert not warnings
    for text in (CAMEL, "hello World 2026\n\n  it'LL/do\n日本"):
        assert await loaded.encode(text) == reference(text, add_special_tokens=False)["input_ids"]
    assert ACROSS not in spelt(loaded, await loaded.encode(CAMEL))
    assert f"{folder / 'tokenizer.json'} splits texts by a wrong pattern; that of tekken.json is used" in caplog.text


async def test_a_split_that_nothing_tells_wrong_stays_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, warnings: list[str]
) -> None:
    folder = mistral_folder(tmp_path, WRONG)
    assert await crosses(folder)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "put the tekken.json of the model into its folder" in caplog.text
    assert not warnings, "it would name an option that the gateway does not have"


@pytest.mark.parametrize(
    ("pattern", "num_tokens", "tekken", "config"),
    [
        (TEKKEN, 100_100, None, {}),
        (TEKKEN, 100_100, {"config": {"pattern": TEKKEN}}, {}),
        (WRONG, 100_100, {"config": {"pattern": WRONG}}, {}),
        (WRONG, 100_100, {"config": {"pattern": TEKKEN}}, {"transformers_version": "5.0.0"}),
        (WRONG, 100_100, {"config": {"pattern": TEKKEN}}, {"model_type": "llama"}),
        (WRONG, 300, {"config": {"pattern": TEKKEN}}, {}),
        (None, 300, {"config": {"pattern": TEKKEN}}, {}),
        (None, 100_100, {"config": {"pattern": TEKKEN}}, {}),
    ],
    ids=["right", "right twice", "its own", "new", "another family", "small", "SentencePiece", "large SentencePiece"],
)
async def test_a_split_that_is_not_suspect_or_not_wrong_stays(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    warnings: list[str],
    pattern: str | None,
    num_tokens: int,
    tekken: object,
    config: dict[str, object],
) -> None:
    caplog.set_level("INFO")
    folder = mistral_folder(tmp_path, pattern, num_tokens, tekken)
    stated = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(stated))
    before = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    after = ModelTokenizer.load(folder)._backend.pre_tokenizer
    assert after.__getstate__() == before.__getstate__()
    told = [each.message for each in caplog.records if each.name.startswith("gateway")]  # `transformers` tells more
    assert not [*warnings, *told]


async def test_a_checkpoint_that_asks_for_the_fix_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, warnings: list[str]
) -> None:
    assert not await crosses(mistral_folder(tmp_path, WRONG, fix_mistral_regex=True))
    told = [each.message for each in caplog.records if each.name.startswith("gateway")]  # `transformers` tells more
    assert not [*warnings, *told]


def test_a_pattern_that_is_none_is_the_operators_to_mend(tmp_path: Path) -> None:
    folder = mistral_folder(tmp_path, WRONG, tekken={"config": {"pattern": "("}})
    with pytest.raises(OperatorError, match=r"tekken\.json has a pattern that is no regular expression"):
        ModelTokenizer.load(folder)


def test_tokens_are_spelt_by_text_or_bytes() -> None:
    (hello,) = encode("hello")
    assert tokenizer().spelling(hello) == ("hello", b"hello")
    assert tokenizer().spelling(0) == ("<s>", b"<s>")
    assert tokenizer().spelling(10**6) == ("", b"")
    first, *_ = encode("🦊")
    name, content = tokenizer().spelling(first)
    assert "🦊".encode().startswith(content)
    assert name == "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
    for text in ["naïve café", "日本語 🦊", "\x00\x7f\u00ad ~"]:
        assert b"".join(tokenizer().spelling(token_id)[1] for token_id in encode(text)) == text.encode()


def test_tokens_of_sentencepiece_are_spelt_with_their_space() -> None:
    backend = byte_fallback_backend()
    model_tokenizer = wrap(backend)
    token_ids = backend.encode("a é", add_special_tokens=False).ids
    assert b"".join(model_tokenizer.spelling(token_id)[1] for token_id in token_ids) == " a é".encode()
    byte = backend.token_to_id("<0xC3>")
    assert byte is not None
    assert model_tokenizer.spelling(byte) == ("bytes:\\xc3", b"\xc3")
    space = backend.token_to_id("<0x20>")
    assert space is not None
    assert model_tokenizer.spelling(space) == (" ", b" ")


def test_tokens_of_several_spaces_are_spelt_whole() -> None:
    backend = byte_fallback_backend()
    backend.add_tokens(["▁▁", "▁▁▁▁he"])
    model_tokenizer = wrap(backend)
    for raw in ("▁", "▁▁", "▁▁▁▁he"):
        token_id = backend.token_to_id(raw)
        assert token_id is not None
        assert model_tokenizer.spelling(token_id)[0] == raw.replace("▁", " ")


@pytest.mark.parametrize(("mention", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_developers_are_the_system_where_the_template_does_not_know_them(mention: str, role: str) -> None:
    template = mention + "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}]
    rendered = wrap(byte_fallback_backend(), template).render_chat(messages)
    assert rendered == f"{role}: be brief;user: hello;"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, SamplingDefaults()),
        ({"temperature": 0.6, "top_p": 0.9}, SamplingDefaults()),
        ({"do_sample": False, "temperature": 0.6}, SamplingDefaults()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "eos": 1},
            SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05),
        ),
        ({"do_sample": True, "temperature": None}, SamplingDefaults()),
        ({"do_sample": True, "min_p": 0.1}, SamplingDefaults(min_p=0.1)),
        ({"repetition_penalty": 1.1, "min_p": 0.1}, SamplingDefaults(repetition_penalty=1.1)),
        ({"do_sample": False, "repetition_penalty": 1.1}, SamplingDefaults(repetition_penalty=1.1)),
    ],
)
def test_sampling_defaults_of_the_model(
    tmp_path: Path, config: dict[str, object] | None, expected: SamplingDefaults
) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert SamplingDefaults.from_model(tmp_path) == expected


@pytest.mark.parametrize(
    "content", ["{", "[]", "[" * 100_000, '{"do_sample": true, "temperature": -1}', '{"repetition_penalty": 0}']
)
def test_sampling_defaults_that_cannot_be_used(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(OperatorError, match=r"generation_config\.json"):
        SamplingDefaults.from_model(tmp_path)
