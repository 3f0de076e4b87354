"""How many tokens a request may generate: as many as it asks for, within the model's context and the size of an
answer."""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.intake.schemas import SamplingFields
from gateway.web.http_errors import ApiError, invalid

TOKEN_ID_BYTES: Final = 8
"""Assumed bytes of an answer for the id of each token, if ids are asked for."""
_TOKEN_BYTES: Final = 4
"""Assumed bytes of an answer for each token."""
_LOGPROB_BYTES: Final = 80
"""Assumed bytes of an answer for each log probability in it."""


class LengthLimit(NamedTuple):
    """Bounds of the number of tokens to generate, and the name of the field that sets it."""

    param: str
    asked: int | None
    default: int | None
    """Number of tokens if the client gives none; None for all that the context leaves."""
    most: int
    """Most tokens for each choice under the bound on the size of a request's answers."""
    most_bytes: int
    """That bound."""

    def max_tokens(self, num_prompt_tokens: int, context: int) -> int:
        """Most tokens of each choice after a prompt. Raises `ApiError`, a 400, if the client asks for too many."""
        rest = context - num_prompt_tokens
        max_tokens = self.asked
        if max_tokens is None:
            return min(rest if self.default is None else self.default, rest, self.most)
        if max_tokens > rest:
            message = f"{_longest(context)}: {num_prompt_tokens} of prompt and {self.param} {max_tokens} are more"
            raise invalid(self.param, message, code="context_length_exceeded")
        if max_tokens > self.most:
            message = (
                f"{self.param} {max_tokens} of each choice could make an answer of more than {self.most_bytes} bytes: "
                f"with so many prompts, choices and log probabilities it is at most {self.most}"
            )
            raise invalid(self.param, message)
        return max_tokens


def most_tokens(
    form: SamplingFields,
    most_bytes: int,
    num_prompts: int,
    num_logprobs: int | None,
    num_prompt_tokens: int = 0,
    echoed: int | None = None,
) -> int:
    """Most tokens for each choice so that the answers to a request have at most `most_bytes`.

    `echoed` is the number of alternatives reported with the prompt's echoed log probabilities, None for no echo. These,
    and `prompt_logprobs`, use up part of the bound.
    """
    n, prompted = form.n or 1, form.prompt_logprobs
    prompt_bytes = n * num_prompt_tokens * (_report_bytes(echoed) + _report_bytes(prompted))
    if prompt_bytes > most_bytes:
        message = (
            f"log probabilities of {num_prompt_tokens} tokens of prompt could make an answer of more than "
            f"{most_bytes} bytes"
        )
        raise invalid("logprobs" if prompted is None else "prompt_logprobs", message)
    token_bytes = _TOKEN_BYTES + _report_bytes(num_logprobs) + (TOKEN_ID_BYTES if form.return_token_ids else 0)
    most = (most_bytes - prompt_bytes) // (num_prompts * n * token_bytes)
    if not most:
        raise invalid("n", "so many prompts, choices and log probabilities are more than one answer may have")
    return most


def too_long(param: str, num_tokens: int | None, context: int) -> ApiError:
    """The refusal of a prompt. `num_tokens` is the count as far as it is known, or a lower bound; None if it is only
    known to exceed the context."""
    counted = f"more than {context}" if num_tokens is None else str(num_tokens)
    message = f"{_longest(context)}, of which at least one is to be generated: {param} has {counted}"
    return invalid(param, message, code="context_length_exceeded")


def _report_bytes(num_logprobs: int | None) -> int:
    """Assumed bytes of an answer for the log probabilities of one token with `num_logprobs` alternatives."""
    return 0 if num_logprobs is None else _LOGPROB_BYTES * (1 + num_logprobs)


def _longest(context: int) -> str:
    """OpenAI's wording, which clients such as LiteLLM recognise; not all of them read the error code."""
    return f"This model's maximum context length is {context} tokens"
