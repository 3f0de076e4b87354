"""The model's tokenizer and chat template, loaded with `transformers` but without the parts that the gateway must not
load.

Encoding and decoding use the Rust tokenizer behind the `transformers` object. It may be used from several threads at
once, releases the interpreter lock in its batch forms, and never removes spaces from decoded text. A decoder that does
could contradict text that was already sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import AddedToken

from common.contract.errors import BatonError, OperatorError
from common.runtime.malloc import give_memory_back
from gateway.text.detokenizer import TokenDecoder
from gateway.text.plain_text import Marker
from gateway.text.tekken import load_options, mend_split

_THREAD_CHARS = 2048
"""Texts of at least this many characters, half a millisecond's work, are encoded in a thread; the switch to a thread
and back costs a fifth of that."""
_THREAD_TOKENS = 1024
"""Sequences of at least this many tokens, a millisecond's work, are decoded in a thread. `raw` spells at
most this many in one turn of the event loop."""
_NUM_THREADS = 4
_SLICE_CHARS = 2**14
"""Characters of a slice when a long text is counted before it is encoded."""
_SURE_BYTES_PER_TOKEN = 6
"""A text with at most this many bytes per token of its limit is encoded without counting. Hardly any text has more
bytes per token, and the limit bounds the work."""
_LARGE_BYTES = 2**18
"""Texts of at least this many bytes are encoded one at a time, because each takes up to 200 times its size in memory
meanwhile; the freed memory is then returned to the system."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_TAGS = ("<think>", "</think>")
"""Tokens that templates write, and look for in the texts of earlier messages."""
_UNSETTLED = "�"
_PROBE = "xyzzy"
_PROBING_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
"""A message's text, and a function, to find out what a chat template writes."""
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
"""Exceptions that a template may raise. The sandbox's `range` raises `OverflowError` beyond 100,000 items."""
_TEMPLATE_NAMES = frozenset(
    {"messages", "raise_exception", "strftime_now", "namespace", "dict", "range", "self", "conversations"}
)
"""Names that `transformers` gives to every template, besides special tokens and rendering options."""


PromptEnding: TypeAlias = Literal["answer", "message", "nothing"]
"""What the rendered conversation is open for: the assistant's turn, more of the last message, or any turn."""


class ChatTemplateError(BatonError):
    """The model's chat template rejects these messages, or the model has no template."""


class TextTooLong(BatonError):  # noqa: N818 (what is wrong is the text)
    """A text has more tokens than allowed. The exact number is unknown, because counting stops early."""


def keep_torch_out() -> None:
    """Make torch impossible to import in this process, so that `transformers` loads only its tokenizers.

    `transformers` imports torch if it is installed, which would cost a gateway seconds and hundreds of MB. With this, a
    gateway beside an engine behaves as in an image without torch. Call it before anything imports `transformers`.
    """
    assert sys.modules.get("torch") is None, "torch is already loaded"
    sys.modules["torch"] = None  # type: ignore[assignment]  # the documented way to make an import fail
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


class ModelTokenizer:
    """Converts between text and tokens for one model."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a `transformers` tokenizer with a Rust backend; this object takes ownership of it."""
        self._templates = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        """Largest token id plus 1, added tokens included."""
        self.eos_token_id: int | None = tokenizer.eos_token_id
        """The end-of-sequence token, if there is one. The model may have others, too."""
        added = self._backend.get_added_tokens_decoder()
        self._added = {token.content: index for index, token in added.items()}
        special = {index for index, token in added.items() if token.special}
        self._with_text = frozenset(vocabulary.values()) - special
        self.stop_specials: Collection[int] = ()
        """Special tokens that have text only because they are stop strings: none."""
        self._rendering_options = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        specials = [token.content for token in added.values() if token.special]
        self._marker = Marker(specials)  # `_turns` renders conversations with it
        self._marker = Marker([*specials, *self._turns()])
        self._marking: Any = None
        """The backend that has the mark as a token. It is made here because all other threads wait for a copy."""
        if tokenizer.chat_template is not None:
            self._marking = copy.deepcopy(self._backend)
            self._marking.add_tokens([AddedToken(self._marker.mark, normalized=False)])
        self._spellings: dict[int, tuple[str, bytes]] = {}
        self._longest_bytes = max(len(token.encode()) for token in vocabulary)
        """Most bytes of any token's spelling in the vocabulary; no token stands for more bytes of text."""
        self.threads = ThreadPoolExecutor(_NUM_THREADS, "tokenizer")
        """Threads for long texts and sequences. Work whose caller leaves before it has begun is left out."""
        self._large = ThreadPoolExecutor(1, "tokenizer-large")
        """The thread for very long texts."""

    @classmethod
    def load(cls, folder: Path, chat_template: Path | None = None) -> ModelTokenizer:
        """Load the tokenizer of the checkpoint in `folder`, without network access. A template in a file
        `chat_template` replaces the checkpoint's own.

        Raises `OperatorError` if there is no tokenizer, or no template in that file, that can be used.
        """
        from transformers import AutoTokenizer  # after `keep_torch_out`

        # From other files `transformers` may make a tokenizer that lacks parts, such as the token before each text.
        if not (folder / "tokenizer.json").is_file():
            raise OperatorError(
                f"{folder} has no tokenizer.json: put the one of the model's family there, or use a checkpoint with one"
            )
        try:
            # Without trust_remote_code=False, `transformers` asks a person at a terminal and may run the checkpoint's
            # code.
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, **load_options(folder)
            )
        except Exception as error:  # malformed files raise many unrelated types
            raise OperatorError(f"cannot load a tokenizer from {folder}: {error}") from error
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise OperatorError(f"the tokenizer in {folder} has no fast form (tokenizer.json)")
        mend_split(tokenizer.backend_tokenizer, folder)
        if chat_template is None:
            return cls(tokenizer)
        try:
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise OperatorError(f"--chat-template: cannot read {chat_template}: {error}") from error
        loaded = cls(tokenizer)
        try:
            loaded.render_chat([{"role": "user", "content": _PROBE}])
        except ChatTemplateError as error:  # it may refuse this conversation; but it must be a template
            if isinstance(why := error.__cause__, TemplateSyntaxError):
                raise OperatorError(f"--chat-template: {chat_template}, line {why.lineno}: {why.message}") from error
        return loaded

    def least_tokens(self, text: str) -> int:
        """Least number of tokens of a text, derived from its length alone."""
        return -(-len(self._marker.unmarked(text).encode()) // self._longest_bytes)

    async def encode(self, text: str, at_most: int | None = None, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text. `add_special_tokens`: with those that the model puts around a text; False for one that
        brings its own, such as a conversation that `render_chat` has rendered, in which those that clients spell are
        text.

        Raises `TextTooLong`, without encoding, for a text that clearly has more than `at_most` tokens. A text near that
        number is encoded, because only that gives its number of tokens.
        """
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
                    give_memory_back()

        threads = self.threads if num_bytes < _LARGE_BYTES else self._large
        return await asyncio.get_running_loop().run_in_executor(threads, encode)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        switches: Mapping[str, Any] | None = None,
        ending: PromptEnding = "answer",
    ) -> str:
        """Render a conversation as the model reads it, up to where the assistant is to speak. `ending` may end it after
        the last message's text or turn instead.

        `tools` are the functions that the model is told about. `switches` are further variables of its chat template;
        `takes_switch` must hold for each. Special tokens, and others that the template writes, get marks inside where
        any of these spell them; `encode` removes the marks. Raises `ChatTemplateError`.
        """
        if self._templates.chat_template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        if "developer" not in self.chat_template(bool(tools)):  # OpenAI's later name, which many templates leave out
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
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

    def chat_template(self, with_tools: bool) -> str:
        """The model's chat template for conversations with functions or without; empty if there is none."""
        template = self._templates.chat_template
        if isinstance(template, Mapping):
            template = (template.get("tool_use") if with_tools else None) or template.get("default")
        return template or ""

    def takes_switch(self, name: str) -> bool:
        """Whether a client may set this variable of the chat template: it is not reserved."""
        special = name.endswith("_token") or name in self._templates.special_tokens_map
        taken = name in _TEMPLATE_NAMES or name in self._rendering_options or name.startswith("_")
        return name.isidentifier() and not special and not taken

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, without special tokens."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, with special tokens spelt out."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text

    async def text_of(self, token_ids: Sequence[int], *, with_special: bool) -> str:
        """The text of `token_ids`, of which there may be many, as `decode_all` or else `decode` gives it."""
        if len(token_ids) < _THREAD_TOKENS:
            return self.decode_all(token_ids) if with_special else self.decode(token_ids)

        def decode() -> str:
            # Only the batch form releases the interpreter lock.
            texts: list[str] = self._backend.decode_batch([token_ids], skip_special_tokens=not with_special)
            return texts[0]

        return await asyncio.get_running_loop().run_in_executor(self.threads, decode)

    def spelling_out(self, markers: Iterable[str], stops: Iterable[str] = ()) -> TokenDecoder:
        """A decoder that also gives the text of those `markers` and stop strings that are special tokens."""
        marked, stopping = self._special(markers), self._special(stops)
        return _SpellingOut(self, marked | stopping, stopping - marked) if marked or stopping else self

    def spelling_all(self) -> TokenDecoder:
        """A decoder that also gives the text of every special token."""
        return self.spelling_out(self._added)

    def added_token(self, text: str) -> int | None:
        """Id of the token added to the vocabulary for this text, special or not; None if there is none."""
        return self._added.get(text)

    def has_text(self, token_id: int) -> bool:
        """Whether `decode` gives text for this token: it is in the vocabulary, and not special."""
        return token_id in self._with_text

    async def raw(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it; empty for one that it lacks. Other tasks can run meanwhile."""
        names: list[str] = []
        for start in range(0, len(token_ids), _THREAD_TOKENS):
            if start:
                await asyncio.sleep(0)
            names += [self._backend.id_to_token(each) or "" for each in token_ids[start : start + _THREAD_TOKENS]]
        return names

    def leaves_out(self, role: str, *, with_tools: bool) -> bool:
        """Whether the chat template writes nothing of a message of this role, before a user's message or after one. A
        template that refuses the role leaves nothing out."""
        probe, user = {"role": role, "content": _PROBE}, {"role": "user", "content": "a"}
        tools = [_PROBING_TOOL] if with_tools else ()
        texts: list[str] = []
        for messages in ([probe, user], [user, probe]):
            with contextlib.suppress(ChatTemplateError):
                texts.append(self.render_chat(messages, tools))
        return bool(texts) and not any(_PROBE in text for text in texts)

    def spelling(self, token_id: int) -> tuple[str, bytes]:
        r"""Name and bytes of a single token, for reports of log probabilities.

        The name is the token's text. For a token that is not a whole text it is `bytes:` and the bytes as `\x..`.
        """
        known = self._spellings.get(token_id)
        if known is None:
            known = self._spellings[token_id] = self._spell(token_id)
        return known

    def _turns(self) -> list[str]:
        """The added tokens that are not called special, but open or close parts of a conversation: the chat template
        writes them around messages of users and assistants."""
        written: set[int] = set()
        for roles in (("user", "assistant", "user"), ("system", "user")):
            with contextlib.suppress(ChatTemplateError):
                text = self.render_chat([{"role": role, "content": _PROBE} for role in roles])
                written.update(self._encode_whole(text, False))
        written &= self._with_text
        return [
            each for each, index in self._added.items() if index in written and not (each in _TAGS or each.isspace())
        ]

    def _special(self, spellings: Iterable[str]) -> frozenset[int]:
        """The special tokens among texts."""
        return frozenset(self._added[each] for each in spellings if each in self._added) - self._with_text

    def _encode_whole(self, text: str, add_special_tokens: bool) -> list[int]:
        # Only the batch form releases the interpreter lock.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids

    def _encode_marked(self, text: str) -> list[int]:
        """The tokens of a conversation in which clients have spelt special tokens. The text is split at marks, as at
        any added token."""
        mark = self._marking.token_to_id(self._marker.mark)
        (encoding,) = self._marking.encode_batch_fast([text], add_special_tokens=False)
        return [token for token in encoding.ids if token != mark]

    def _refuse_clearly_too_long(self, text: str, at_most: int) -> None:
        """Count the tokens in slices, and raise `TextTooLong` if there are clearly too many. One or two tokens at each
        seam differ from those of the whole text, so texts slightly above `at_most` pass."""
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
            num_spaces = len(raw) - len(raw.lstrip("▁"))
            if num_spaces and not text.startswith(" " * num_spaces):  # the decoder drops one before the first word
                text = " " + text
            elif not text and _BYTE_TOKEN.fullmatch(raw):  # the byte of a space
                text = " "
            return text, text.encode()
        if match := _BYTE_TOKEN.fullmatch(raw):
            content = bytes.fromhex(match[1])
        elif all(char in _BYTE_OF_CHAR for char in raw):
            content = bytes(_BYTE_OF_CHAR[char] for char in raw)
        else:
            return text, text.encode()
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content


class _SpellingOut:
    """A decoder that also gives the text of some special tokens."""

    def __init__(self, tokenizer: ModelTokenizer, marked: frozenset[int], stop_specials: frozenset[int]) -> None:
        """`marked` are the tokens, among them `stop_specials`."""
        self._tokenizer = tokenizer
        self._marked = marked
        self.stop_specials: Collection[int] = stop_specials
        """As in `TokenDecoder`."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, for each of which `has_text` must hold."""
        return self._tokenizer.decode_all(token_ids)

    def has_text(self, token_id: int) -> bool:
        """Whether `decode` gives text for this token."""
        return token_id in self._marked or self._tokenizer.has_text(token_id)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes in byte-level BPE: visible Latin-1 as itself, the others from U+0100 on, in order."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
