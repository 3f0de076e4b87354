"""A model's dialect: how it writes function calls and reasoning.

The operator names both formats, or leaves it to the model's chat template, which shows how the model was trained to
write. `answer_parts` finds the parts of an answer accordingly, and `tool_grammar` enforces them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from gateway.text import reasoning
from gateway.text.answer_parts import AnswerPlan
from gateway.text.call_parser import CallParser
from gateway.text.tokenizer import ModelTokenizer
from gateway.text.tool_parsers import HermesParser, Llama3Parser, MistralParser

log = logging.getLogger(__name__)

ToolFormat: TypeAlias = Literal["hermes", "llama3", "mistral"]

PARSERS: Final[Mapping[ToolFormat, type[CallParser]]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
}
_OTHERS_WITH_HERMES_TAGS: Final = ("<function=", "<arg_key>")
"""Text in templates of formats that have the tags of Hermes, but no JSON within them: Qwen 3 Coder's and GLM's."""
_THINKING = (reasoning.OPENING, reasoning.CLOSING)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The formats that a model writes."""

    tokenizer: ModelTokenizer
    tool_format: ToolFormat | None
    """None if its calls are not recognised."""
    reasons: bool
    """Whether it writes its reasoning between tags."""

    @classmethod
    def of(cls, tokenizer: ModelTokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto") -> Dialect:
        """The dialect that the operator has set: by name, `none`, or `auto` for what the chat template shows."""
        template = tokenizer.chat_template(with_tools=True)
        tool_format: ToolFormat | None = next((name for name in PARSERS if name == tool_parser), None)
        if tool_parser == "auto":
            tool_format = recognised(template)
        reasons = reasoning_parser == "think"
        if reasoning_parser == "auto":
            # A template may have the closing tag only: the model opens its reasoning itself.
            shown = tokenizer.chat_template(with_tools=False)
            reasons = any(tag in shown for tag in _THINKING)
        log.info("tool calls: %s; reasoning: %s", tool_format or "none", "think" if reasons else "none")
        return cls(tokenizer, tool_format, reasons)

    @property
    def takes_one_call(self) -> bool:
        """Whether the model's templates refuse a message of several calls: an answer with more could not be sent
        back."""
        return self.tool_format == "llama3"

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template tells the model about functions."""
        return self.reads("tools")

    def reads(self, name: str, *, with_tools: bool = True) -> bool:
        """Whether the chat template for conversations with functions, or without, has a variable of this name."""
        return re.search(rf"\b{name}\b", self.tokenizer.chat_template(with_tools)) is not None

    def opens_reasoning(self, prompt: str, continued: str = "") -> bool:
        """Whether an answer to this prompt begins within the reasoning. `continued` is the text of the message at the
        end of the prompt that the answer continues, if it does."""
        opened = prompt.rstrip().endswith(reasoning.OPENING) or reasoning.is_within(continued)
        return self.reasons and opened

    def may_reason(self, prompt: str) -> bool:
        """Whether the model may reason before it answers this prompt: not if the prompt ends with closed reasoning."""
        return self.reasons and not prompt.rstrip().endswith(reasoning.CLOSING)

    def tags(self) -> tuple[tuple[str, int], ...]:
        """Tags of calls and reasoning that are single tokens, with their ids."""
        tags = [*_THINKING, *(PARSERS[self.tool_format].markers if self.tool_format is not None else ())]
        return tuple((tag, token) for tag in tags if (token := self.tokenizer.added_token(tag)) is not None)

    def plan(
        self,
        prompt: str,
        names: Collection[str],
        one_call: bool = False,
        include_reasoning: bool = True,
        formatted: bool = False,
        continued: str = "",
        stops: Collection[str] = (),
    ) -> AnswerPlan | None:
        """The parts to look for in answers to `prompt` that may call the functions `names`; None if there are none.
        `formatted`: the answers follow a grammar. `continued` is as in `opens_reasoning`. `stops` are the stop
        strings."""
        new_calls = PARSERS[self.tool_format] if names and self.tool_format is not None else None
        if new_calls is None and not self.reasons:
            return None
        markers = (*(_THINKING if self.reasons else ()), *(new_calls.markers if new_calls else ()))
        return AnswerPlan(
            decoder=self.tokenizer.spelling_out(markers, stops),
            calls=new_calls,
            names=frozenset(names),
            most_calls=1 if new_calls is not None and (one_call or self.takes_one_call) else None,
            reasons=self.reasons,
            opened=self.opens_reasoning(prompt, continued),
            include_reasoning=include_reasoning,
            formatted=formatted,
            within=reasoning.is_within(continued),
        )


def recognised(template: str) -> ToolFormat | None:
    """The call format that a chat template teaches; None if it teaches none that is known."""
    if re.search(r"\btools\b", template) is None:
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or "<|start_header_id|>ipython" in template:
        return "llama3"
    if "<tool_call>" in template and not any(tag in template for tag in _OTHERS_WITH_HERMES_TAGS):
        return "hermes"
    return None
