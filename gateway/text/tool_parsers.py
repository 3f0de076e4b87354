"""Call formats of model families; `call_parser` describes how they are read."""

from __future__ import annotations

import secrets
import string
from typing import Final

from gateway.text.call_parser import MAX_NAME_CHARS, WHITESPACE, CallParser, NotACall, Reading, ReadingText, no_space

_NAME_CHARS: Final = frozenset(string.ascii_letters + string.digits + "_-.")


class HermesParser(CallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and 3, and many others."""

    markers = ("<tool_call>", "</tool_call>")
    openings = ("<tool_call>",)

    def _block(self, opening: str) -> Reading:
        if (yield from no_space()) != "{":
            raise NotACall
        yield from self._call_object()
        char = yield from no_space()
        for expected in self.markers[1]:
            if char != expected:
                raise NotACall
            if expected != ">":
                char = yield


class Llama3Parser(CallParser):
    """`{"name": …, "parameters": {…}}`, at the beginning or after `<|python_tag|>`; further calls follow a `;`."""

    markers = ("<|python_tag|>",)
    openings = ("<|python_tag|>",)

    def _find_opening(self, text: str) -> tuple[int, str] | None:
        if self._at_gap and not self.num_begun and text.lstrip().startswith("{"):
            return text.index("{"), "{"
        return super()._find_opening(text)

    def _block(self, opening: str) -> Reading:
        char = opening if opening == "{" else (yield from no_space())
        while True:
            if char != "{":
                raise NotACall
            if opening != "{" or self.num_begun:
                self._open()
            yield from self._call_object()
            char = yield from no_space()
            if char == ";":
                char = yield from no_space()


class MistralParser(CallParser):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}`, with or without `[ARGS]`."""

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    openings = ("[TOOL_CALLS]",)

    def draw_id(self) -> str:
        """Nine letters and digits: the templates of these models accept no other ids."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _block(self, opening: str) -> Reading:
        char = yield from no_space()
        if char != "[":
            yield from self._named(char)
            return
        while True:
            if (yield from no_space()) != "{":
                raise NotACall
            self._open()
            yield from self._call_object()
            char = yield from no_space()
            if char == "]":
                return
            if char != ",":
                raise NotACall

    def _named(self, char: str) -> Reading:
        name = ""
        while char in _NAME_CHARS and len(name) < MAX_NAME_CHARS:
            name += char
            char = yield
        name = self._known(name)
        if char == "[":
            tag = yield from self._tag()
            if tag == "[CALL_ID]":
                for _ in range(MAX_NAME_CHARS):
                    if (yield) == "[":
                        break
                tag = yield from self._tag()
            if tag != "[ARGS]":
                raise NotACall
            char = yield
        if char in WHITESPACE:
            char = yield from no_space()
        if char != "{":
            raise NotACall
        self._begin(name)
        yield from self._object(char, self._argue)
        self._complete()

    def _tag(self) -> ReadingText:
        """Read a marker after its opening bracket, and return it."""
        tag = "["
        while not tag.endswith("]") and len(tag) < len("[CALL_ID]"):
            tag += yield
        return tag
