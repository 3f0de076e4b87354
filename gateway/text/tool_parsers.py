"""Call formats of model families; `call_parser` describes how they are read."""

from __future__ import annotations

import re
import secrets
import string
from typing import Final

from gateway.text.call_grammars import ARGUMENTS, BARE_HEAD, SPACE, pattern
from gateway.text.call_parser import CallParser

_NAMED: Final = re.compile(r"\[TOOL_CALLS\]\s*([a-zA-Z0-9_.-]+)")


class HermesParser(CallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and 3, and many others."""

    markers = ("<tool_call>", "</tool_call>")
    opening = "<tool_call>"
    before_call = pattern(SPACE + r"\{")
    after_call = pattern(SPACE + "</tool_call>")


class Llama3Parser(CallParser):
    """`{"name": …, "parameters": {…}}`, at the beginning or after `<|python_tag|>`; further calls follow a `;`."""

    markers = ("<|python_tag|>",)
    opening = "<|python_tag|>"
    head = BARE_HEAD
    before_call = pattern(SPACE + r"\{")
    after_call = pattern(rf"{SPACE};?{SPACE}\{{")

    def _split(self, text: str) -> tuple[str, str, str]:
        if self._at_gap and not self.num_begun and text.lstrip().startswith("{"):
            return text.partition("{")
        return super()._split(text)


class MistralParser(CallParser):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}`, with or without `[ARGS]`."""

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    opening = "[TOOL_CALLS]"
    before_call = pattern(rf"{SPACE}(\[{SPACE}|[a-zA-Z0-9_.-]+((\[CALL_ID\][a-zA-Z0-9_-]*)?\[ARGS\])?{SPACE})\{{")
    after_call = pattern(rf"{SPACE}(\]|,{SPACE}\{{)")

    def draw_id(self) -> str:
        """Nine letters and digits: the templates of these models accept no other ids."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _expect_head(self) -> None:
        named = _NAMED.match("".join(self._held))
        if named is None:
            super()._expect_head()
        else:
            self._begin(named[1], "{")
            self._expect(ARGUMENTS, self._end_named)

    def _end_named(self) -> None:
        self.num_complete += 1
        self._leave()
