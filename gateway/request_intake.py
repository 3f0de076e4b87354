"""From a request's form to what is to be generated: tokenise, fill in defaults, and hold it against the limits."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from common.contract.sampling import SamplingParams
from gateway.api_settings import ApiSettings
from gateway.generation import Generation
from gateway.http_errors import ApiError, invalid
from gateway.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Prompt,
    SamplingFields,
    TokenizeRequest,
)
from gateway.tokenizer import ChatTemplateError, ModelTokenizer

COMPLETION_MAX_TOKENS = 16
"""What the OpenAI API takes when a completions request leaves `max_tokens` out."""

_SAMPLING = TypeAdapter(SamplingParams)
_PASSED_ON = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "seed",
)
"""Fields that are sampling parameters under the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request, ready to be generated."""

    generations: tuple[Generation, ...]
    """One for each prompt; choice `c` of prompt `p` is choice `p * n + c` of the request."""
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    """End the stream with a chunk that carries the usage."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(generation.token_ids) for generation in self.generations)

    @property
    def with_logprobs(self) -> bool:
        """Whether log probabilities were asked for."""
        return self.generations[0].sampling.logprobs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _LengthLimit:
    """The most tokens that a client asked for, and what it called that."""

    param: str
    asked: int | None
    default: int | None
    """None for all that the context leaves."""


class Intake:
    """Turns validated forms into jobs. Raises `ApiError`, a 400 (or 404, for the model) naming the field at fault."""

    def __init__(
        self, tokenizer: ModelTokenizer, settings: ApiSettings, workers_take: Callable[[], int | None] = lambda: None
    ) -> None:
        """`workers_take` tells the most tokens of one sequence that every worker takes, which may be below the
        context where a KV cache is small; None while that is not known."""
        self._tokenizer = tokenizer
        self._workers_take = workers_take
        self._settings = settings
        self._limits = settings.limits

    async def completion(self, form: CompletionRequest, tenant: str = "") -> Job:
        """A job of one generation for each prompt."""
        self._check_form(form)
        if len(form.prompt) > self._limits.max_prompts:
            raise invalid("prompt", f"{len(form.prompt)} prompts, at most {self._limits.max_prompts} in one request")
        length = _LengthLimit(param="max_tokens", asked=form.max_tokens, default=COMPLETION_MAX_TOKENS)
        generations = []
        for prompt in form.prompt:
            token_ids = await self._prompt_tokens(prompt)
            generations.append(self._generation(form, tenant, token_ids, "prompt", length, form.logprobs))
        return self._job(form, generations)

    async def chat(self, form: ChatRequest, tenant: str = "") -> Job:
        """A job of one generation."""
        self._check_form(form)
        if form.top_logprobs is not None and not form.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        length = (
            _LengthLimit(param="max_tokens", asked=form.max_tokens, default=None)
            if form.max_completion_tokens is None
            else _LengthLimit(param="max_completion_tokens", asked=form.max_completion_tokens, default=None)
        )
        token_ids = await self._chat_tokens(form.messages)
        num_logprobs = (form.top_logprobs or 0) if form.logprobs else None
        return self._job(form, [self._generation(form, tenant, token_ids, "messages", length, num_logprobs)])

    async def tokenize(self, form: TokenizeRequest) -> list[int]:
        """The tokens of a text or a conversation."""
        self.check_model(form.model)
        if (form.prompt is None) == (form.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if form.messages is not None:
            return await self._chat_tokens(form.messages)
        assert form.prompt is not None
        return await self._tokenizer.encode(form.prompt)

    def detokenize(self, form: DetokenizeRequest) -> str:
        """The text of tokens, special ones spelt out."""
        self.check_model(form.model)
        if len(form.tokens) > self._limits.max_sequence_tokens:
            raise invalid("tokens", f"{len(form.tokens)} tokens, at most {self._limits.max_sequence_tokens}")
        self._check_vocabulary(form.tokens, "tokens")
        return self._tokenizer.decode_all(form.tokens)

    def check_model(self, name: str | None) -> None:
        """A request may leave the model out, there being one; it may not name another."""
        if name is not None and name != self._settings.model_name:
            raise ApiError(404, f"the model {name} is not served here", param="model", code="model_not_found")

    def _check_form(self, form: SamplingFields) -> None:
        self.check_model(form.model)
        if form.stream_options is not None and not form.stream:
            raise invalid("stream_options", "stream_options needs stream to be true")
        if form.n is not None and not 1 <= form.n <= self._limits.max_choices:
            raise invalid("n", f"n must be between 1 and {self._limits.max_choices}, not {form.n}")
        if len(form.stop) > self._limits.max_stop_strings:
            raise invalid("stop", f"{len(form.stop)} stop strings, at most {self._limits.max_stop_strings}")
        if any(len(stop) > self._limits.max_stop_chars for stop in form.stop):
            raise invalid("stop", f"a stop string is longer than {self._limits.max_stop_chars} characters")
        self._check_vocabulary(form.stop_token_ids or [], "stop_token_ids")

    def _check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        size = self._settings.model_vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            raise invalid(param, f"{param}: the model's token ids are 0 to {size - 1}")

    async def _prompt_tokens(self, prompt: Prompt) -> list[int]:
        return await self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    async def _chat_tokens(self, messages: Sequence[ChatMessage]) -> list[int]:
        try:
            return await self._tokenizer.encode_chat([message.model_dump(exclude_none=True) for message in messages])
        except ChatTemplateError as error:
            raise invalid("messages", str(error)) from error

    def _generation(
        self,
        form: SamplingFields,
        tenant: str,
        token_ids: list[int],
        param: str,
        length: _LengthLimit,
        num_logprobs: int | None,
    ) -> Generation:
        """`param` is the field that the prompt came from."""
        context = min(self._limits.max_sequence_tokens, self._workers_take() or self._limits.max_sequence_tokens)
        if not token_ids:
            raise invalid(param, f"{param} must not be empty")
        if len(token_ids) >= context:
            message = f"{param} has {len(token_ids)} tokens; with at least one to generate, the context takes {context}"
            raise invalid(param, message, code="context_length_exceeded")
        self._check_vocabulary(token_ids, param)
        rest = context - len(token_ids)
        max_tokens = length.asked
        if max_tokens is None:
            max_tokens = rest if length.default is None else min(length.default, rest)
        if max_tokens > rest:
            message = f"{len(token_ids)} tokens of prompt and {length.param} {max_tokens} exceed the context, {context}"
            raise invalid(length.param, message, code="context_length_exceeded")
        return Generation(
            token_ids=tuple(token_ids),
            num_choices=form.n or 1,
            sampling=self._sampling(form, max_tokens, length.param, num_logprobs),
            budget_s=self._limits.default_budget_s,
            tier=form.service_tier,
            tenant=tenant,
            cache_salt=_cache_salt(tenant, form.cache_salt),
        )

    def _sampling(
        self, form: SamplingFields, max_tokens: int, length_param: str, num_logprobs: int | None
    ) -> SamplingParams:
        defaults = self._settings.sampling_defaults
        fields = {
            "max_tokens": max_tokens,
            "temperature": defaults.temperature,
            "top_p": defaults.top_p,
            "top_k": defaults.top_k,
            "repetition_penalty": defaults.repetition_penalty,
            "seed": secrets.randbits(63),
            "stop_token_ids": tuple(form.stop_token_ids or ()),
            "logprobs": num_logprobs,
        }
        fields |= {name: value for name in _PASSED_ON if (value := getattr(form, name)) is not None}
        if fields["top_k"] == -1:
            fields["top_k"] = 0
        try:
            sampling = _SAMPLING.validate_python(fields)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            param = {
                "max_tokens": length_param,
                "logprobs": "top_logprobs" if isinstance(form, ChatRequest) else "logprobs",
            }.get(str(first["loc"][0]), str(first["loc"][0]))
            raise invalid(param, f"{param}: {first['msg']}") from error
        if sampling.min_tokens > sampling.max_tokens:
            raise invalid("min_tokens", f"min_tokens {sampling.min_tokens} is more than the {max_tokens} to generate")
        return sampling

    def _job(self, form: SamplingFields, generations: Sequence[Generation]) -> Job:
        return Job(
            generations=tuple(generations),
            stops=form.stop,
            stream=bool(form.stream),
            include_usage=form.stream_options is not None and bool(form.stream_options.include_usage),
        )


def _cache_salt(tenant: str, cache_salt: str | None) -> str:
    """What separates one request's cached prefixes from another's: the tenant and what the client asks for besides.

    A tenant is printable and holds no line end, so two pairs are never written alike; the digest brings any of them
    within the bounds of the wire. Where neither is given, everyone shares.
    """
    if not tenant and cache_salt is None:
        return ""
    return hashlib.sha256(f"{tenant}\n{cache_salt or ''}".encode()).hexdigest()
