"""From a validated request form to a job: tokenise the prompts, fill in defaults, and enforce the limits."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, NamedTuple

from common.contract.sampling import SamplingParams
from gateway.api_settings import ApiSettings
from gateway.intake.conversations import ending_of, rendered
from gateway.intake.field_types import Prompt
from gateway.intake.ignored_fields import IGNORED_FIELDS
from gateway.intake.length_limit import TOKEN_ID_BYTES, LengthLimit, most_tokens, too_long
from gateway.intake.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from gateway.intake.structured_output import grammar_of
from gateway.intake.tool_grammar import chat_grammar, usable_tools
from gateway.serving.generation import Admittance, Generation, Readiness
from gateway.text.answer_parts import AnswerPlan
from gateway.text.detokenizer import TokenDecoder
from gateway.text.dialect import Dialect
from gateway.text.tokenizer import ModelTokenizer, TextTooLong
from gateway.web.http_errors import ApiError, invalid

COMPLETION_MAX_TOKENS = 16
"""Default of `max_tokens` for a completions request, as in the OpenAI API."""

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
"""Fields that are sampling parameters of the same name."""
_EFFORTS: Final = ("reasoning_effort", "verbosity")
"""Fields that few chat templates read; a request with one that the template does not read is logged."""


_LONG_CHARS: Final = 2048
"""Texts of at least this many characters together are charged before they are tokenised."""


class Job(NamedTuple):
    """One validated request, ready to be generated."""

    generations: tuple[Generation, ...]
    """One for each prompt; choice `c` of prompt `p` is choice `p * n + c` of the request."""
    stops: tuple[str, ...]
    echoes: tuple[str, ...]
    """For each prompt, the text that its choices begin with."""
    stream: bool
    include_usage: bool
    """End the stream with a chunk that reports usage."""
    plan: AnswerPlan | None = None
    """What to extract from the generated texts: reasoning, calls, or both. None if they are plain text."""
    continuous_usage: bool = False
    """Report the usage so far in each chunk."""
    include_timings: bool = False
    """Report in the usage where the time went."""
    include_drafts: bool = False
    """Report in the usage how many tokens were drafted, and were right."""
    decoder: TokenDecoder | None = None
    """Decoder that spells out all special tokens, if the client asked for that, or those that are stop strings. None
    for the plan's."""
    eos_token_id: int | None = None
    """The tokenizer's end-of-sequence token, unless `ignore_eos`. It is no stop reason."""
    prompt_ids: Sequence[Sequence[int]] | None = None
    """The prompt of each choice, if the answer reports token ids."""
    continues: bool = False
    """Whether the generated texts continue those of the prompts, so that they begin with a space where the model writes
    one: completions, what follows a conversation's last message that is left open, and what follows a grammar, which
    counts that space."""
    generates_nothing: bool = False
    """Whether nothing is to be generated. Workers are then needed only for log probabilities of the prompt."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        first, *others = self.generations
        return len(first.token_ids) + sum(len(other.token_ids) for other in others)

    @property
    def reports_prompt(self) -> bool:
        """Whether log probabilities of the prompts' tokens were asked for."""
        return self.generations[0].prompt_logprobs is not None

    @property
    def with_logprobs(self) -> bool:
        """Whether log probabilities of generated tokens were asked for."""
        return self.generations[0].sampling.logprobs is not None


ChargeAhead = Callable[[int], None]
"""Charges the least tokens that a request's prompts can have, before they, or a prediction, are tokenised; raises as
`Caller.charge_ahead` does."""


def _for_nothing(num_tokens: int) -> None:
    """A `ChargeAhead` that charges nobody."""


class Intake:
    """Turns validated forms into jobs. Raises `ApiError`: a 400 (or a 404 for an unknown model) that names the field at
    fault, or a 429."""

    def __init__(self, tokenizer: ModelTokenizer, settings: ApiSettings, ready: Callable[[], Readiness]) -> None:
        """`ready` tells how many tokens of one sequence the decode workers take: fewer than the model's context if the
        KV caches are small."""
        self._tokenizer = tokenizer
        self._ready = ready
        self._settings = settings
        self._limits = settings.limits
        self._defaults = asdict(settings.sampling_defaults)
        self._most_bytes = settings.limits.max_answer_bytes
        self._dialect = Dialect.of(tokenizer, settings.tool_parser, settings.reasoning_parser)

    async def completion(self, form: CompletionRequest, tenant: str = "", charge: ChargeAhead = _for_nothing) -> Job:
        """A job with one generation for each prompt."""
        self._check_form(form)
        num_prompts = len(form.prompt)
        most_tokens(form, self._most_bytes, num_prompts, form.logprobs)  # refuse before tokenising
        grammar = await grammar_of(form)
        context = self._context()
        self._expect(form.prompt, "prompt", context, charge)
        prompts: list[list[int]] = []
        for number, prompt in enumerate(form.prompt):
            if number:
                await asyncio.sleep(0)  # let other tasks run: there may be many prompts
            prompts.append(await self._tokens(prompt, "prompt", context, form.add_special_tokens))
        echoed = form.logprobs if form.echo else None
        most = most_tokens(form, self._most_bytes, num_prompts, form.logprobs, sum(map(len, prompts)), echoed)
        length = LengthLimit("max_tokens", form.max_tokens, COMPLETION_MAX_TOKENS, most, self._most_bytes)
        generations: list[Generation] = []
        admittance = Admittance()
        for token_ids in prompts:
            if generations:
                await asyncio.sleep(0)
            generation = self._generation(
                form,
                tenant,
                token_ids,
                "prompt",
                context,
                length,
                form.logprobs,
                grammar,
                echoed,
                admittance,
            )
            generations.append(generation)
        echoes: Sequence[str] = await self._echoes(form) if form.echo else ()
        job = self._job(form, generations, echoes, continues=True)
        return await self._with_prediction(job, form, context, charge)

    async def chat(self, form: ChatRequest, tenant: str = "", charge: ChargeAhead = _for_nothing) -> Job:
        """A job with one generation."""
        self._check_form(form)
        if form.top_logprobs and not form.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        num_logprobs = (form.top_logprobs or 0) if form.logprobs else None
        most_tokens(form, self._most_bytes, 1, num_logprobs)  # refuse before tokenising
        tools = usable_tools(form)
        switches = form.switches()
        IGNORED_FIELDS.note(name for name in _EFFORTS if name in switches and not self._dialect.reads(name))
        ending = ending_of(form)
        prompt = await rendered(self._dialect, form.messages, tools, switches, ending)
        context = self._context()
        self._expect([prompt], "messages", context, charge)
        token_ids = await self._tokens(prompt, "messages", context, add_special_tokens=False)
        grammar = await chat_grammar(form, self._dialect, prompt)
        plan = self._dialect.plan(
            prompt,
            [tool.function.name for tool in tools],
            one_call=form.parallel_tool_calls is False,
            include_reasoning=form.include_reasoning is not False,
            formatted=grammar is not None,
            continued=form.continued,
            stops=form.stop,
        )
        most = most_tokens(form, self._most_bytes, 1, num_logprobs, len(token_ids))
        usual = self._usual_length(form, len(token_ids), context)
        length = LengthLimit("max_completion_tokens", form.max_completion_tokens, usual, most, self._most_bytes)
        if form.max_completion_tokens is None:
            length = length._replace(param="max_tokens", asked=form.max_tokens)
        generation = self._generation(form, tenant, token_ids, "messages", context, length, num_logprobs, grammar)
        job = self._job(form, [generation], plan=plan, continues=ending == "message" or grammar is not None)
        return await self._with_prediction(job, form, context, charge)

    async def tokenize(self, form: TokenizeRequest, charge: ChargeAhead = _for_nothing) -> list[int]:
        """The tokens of a text or a conversation, at most `max_sequence_tokens`."""
        self.check_model(form.model)
        if (form.prompt is None) == (form.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        most = self._limits.max_sequence_tokens
        prompt, param, add_special_tokens = form.prompt, "prompt", form.add_special_tokens
        if form.messages is not None:
            if form.add_special_tokens:
                raise invalid("add_special_tokens", "add_special_tokens: a conversation has those of its template")
            switches = form.chat_template_kwargs or {}
            prompt = await rendered(self._dialect, form.messages, form.tools or (), switches)
            param, add_special_tokens = "messages", False
        assert prompt is not None
        self._expect([prompt], param, most, charge)
        token_ids = await self._tokens(prompt, param, most, add_special_tokens)
        if len(token_ids) > most:
            raise too_long(param, len(token_ids), most)
        return token_ids

    async def detokenize(self, form: DetokenizeRequest, charge: Callable[[int], None] = _for_nothing) -> str:
        """The text of tokens, with special tokens spelt out. `charge` charges for all of them, before they are decoded;
        it raises as `Caller.charge_prompt` does."""
        self.check_model(form.model)
        if len(form.tokens) > self._limits.max_sequence_tokens:
            raise invalid("tokens", f"{len(form.tokens)} tokens, at most {self._limits.max_sequence_tokens}")
        self._check_vocabulary(form.tokens, "tokens")
        charge(len(form.tokens))
        return await self._tokenizer.text_of(form.tokens, with_special=True)

    def check_model(self, name: str | None) -> None:
        """Raise a 404 if a request names a model that is not served. It may omit the model, since there is only one."""
        if name is not None and name not in self._settings.names:
            raise ApiError(404, f"the model {name} is not served here", param="model", code="model_not_found")

    def _check_form(self, form: SamplingFields) -> None:
        self.check_model(form.model)
        if form.stream_options is not None and not form.stream:
            raise invalid("stream_options", "stream_options needs stream to be true")
        if form.prompt_logprobs is not None and form.stream:
            raise invalid("prompt_logprobs", "prompt_logprobs are not told in a stream")
        self._check_vocabulary(form.stop_token_ids or [], "stop_token_ids")
        self._check_vocabulary([token for token, _ in form.logit_bias], "logit_bias")

    def _check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        size = self._settings.model_vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            raise invalid(param, f"{param}: the model's token ids are 0 to {size - 1}")

    def _context(self) -> int:
        """Most tokens of prompt and answer together: the model's limit, or less if the decode workers take less."""
        most = self._limits.max_sequence_tokens
        return min(most, self._ready().max_sequence_tokens or most)

    def _usual_length(self, form: ChatRequest, num_prompt_tokens: int, context: int) -> int | None:
        """Tokens of an answer whose client gives no number: what the usual length of a sequence leaves, if that is at
        least `min_tokens`, and half of what the context leaves. Else None, for all of that."""
        left = (self._ready().usual_sequence_tokens or context) - num_prompt_tokens
        return left if left >= max((context - num_prompt_tokens) / 2, form.min_tokens or 0) else None

    def _expect(self, prompts: Sequence[Prompt], param: str, context: int, charge: ChargeAhead) -> None:
        """Before tokenising, refuse texts whose length alone exceeds the context, and charge texts that are long
        together for the least tokens that they can have. Short ones are cheap to tokenise; they are charged afterwards,
        for their actual tokens."""
        expected = num_chars = 0
        for text in prompts:
            if isinstance(text, str):
                least = self._tokenizer.least_tokens(text)
                if least > context:
                    raise too_long(param, least, context)
                expected += least
                num_chars += len(text)
        if num_chars >= _LONG_CHARS:
            charge(expected)

    async def _tokens(self, prompt: Prompt, param: str, context: int, add_special_tokens: bool | None) -> list[int]:
        """The tokens of a prompt; `param` is the field that it came from."""
        if not isinstance(prompt, str):
            return list(prompt)
        try:
            return await self._tokenizer.encode(prompt, context, add_special_tokens=add_special_tokens is not False)
        except TextTooLong as error:
            raise too_long(param, None, context) from error

    async def _echoes(self, form: CompletionRequest) -> list[str]:
        """The text of each prompt."""
        echoes: list[str] = []
        num_bytes = 0
        for prompt in form.prompt:
            if echoes:
                await asyncio.sleep(0)
            text = prompt
            if not isinstance(text, str):
                text = await self._tokenizer.text_of(text, with_special=form.skip_special_tokens is False)
            echoes.append(text)
            num_bytes += len(text.encode(errors="replace"))
        if (form.n or 1) * num_bytes > self._most_bytes:
            raise invalid("echo", f"the echoed prompts, once for each choice, are more than {self._most_bytes} bytes")
        return echoes

    async def _with_prediction(self, job: Job, form: SamplingFields, context: int, charge: ChargeAhead) -> Job:
        """The job with the tokens that the client expects each answer to have, at most as many as the context. They
        cost nothing; but before a long prediction is tokenised, the prompts are charged."""
        if form.prediction is None:
            return job
        text = form.prediction.content
        self._expect([text], "prediction", context, lambda _: charge(job.num_prompt_tokens))
        token_ids = await self._tokens(text, "prediction", context, add_special_tokens=False)
        if len(token_ids) > context:
            raise too_long("prediction", len(token_ids), context)
        self._check_vocabulary(token_ids, "prediction")
        prediction = tuple(token_ids)
        return job._replace(generations=tuple(replace(each, prediction=prediction) for each in job.generations))

    def _generation(
        self,
        form: SamplingFields,
        tenant: str,
        token_ids: list[int],
        param: str,
        context: int,
        length: LengthLimit,
        num_logprobs: int | None,
        grammar: str | None,
        echoed: int | None = None,
        admittance: Admittance | None = None,
    ) -> Generation:
        """`param` is the field that the prompt came from. `echoed` is the number of alternatives for its echoed log
        probabilities, None for no echo. `admittance` is shared with the other prompts."""
        if not token_ids:
            raise invalid(param, f"{param} must not be empty")
        if len(token_ids) >= context:
            raise too_long(param, len(token_ids), context)
        self._check_vocabulary(token_ids, param)
        max_tokens = length.max_tokens(len(token_ids), context)
        if form.min_tokens is not None and form.min_tokens > max_tokens:
            raise invalid("min_tokens", f"min_tokens {form.min_tokens} is more than the {max_tokens} to generate")
        return Generation(
            token_ids=tuple(token_ids),
            num_choices=form.n or 1,
            sampling=self._sampling(form, max(1, max_tokens), num_logprobs, grammar),
            budget_s=self._limits.request_budget_s,
            tier=form.service_tier,
            tenant=tenant,
            cache_salt=_cache_salt(tenant, form.cache_salt),
            prompt_logprobs=max((num for num in (echoed, form.prompt_logprobs) if num is not None), default=None),
            admittance=admittance or Admittance(),
        )

    def _sampling(
        self,
        form: SamplingFields,
        max_tokens: int,
        num_logprobs: int | None,
        grammar: str | None,
    ) -> SamplingParams:
        fields: dict[str, Any] = self._defaults | {
            "max_tokens": max_tokens,
            "seed": secrets.randbits(63),
            "stop_token_ids": tuple(form.stop_token_ids or ()),
            "logit_bias": form.logit_bias,
            "grammar": grammar,
            "logprobs": num_logprobs,
        }
        fields |= {name: value for name in _PASSED_ON if (value := getattr(form, name)) is not None}
        if fields["top_k"] == -1:
            fields["top_k"] = 0
        if fields["seed"] == -1:
            fields["seed"] = secrets.randbits(63)
        if fields["top_p"] == 0:
            fields |= {"top_p": 1.0, "temperature": 0.0}
        return SamplingParams(**fields)  # the form has the bounds of its fields

    def _job(
        self,
        form: SamplingFields,
        generations: Sequence[Generation],
        echoes: Sequence[str] = (),
        plan: AnswerPlan | None = None,
        *,
        continues: bool,
    ) -> Job:
        prompt_ids = None
        if form.return_token_ids:
            prompt_ids = [generation.token_ids for generation in generations for _ in range(generation.num_choices)]
            if sum(map(len, prompt_ids)) * TOKEN_ID_BYTES > self._most_bytes:
                raise invalid("return_token_ids", "the prompts' token ids are more than one answer may have")
        decoder = self._tokenizer.spelling_out((), form.stop) if plan is None else None
        if form.skip_special_tokens is False:
            decoder = self._tokenizer.spelling_all()
        options = form.stream_options
        include_timings = bool(form.include_timings or (options is not None and options.include_timings))
        return Job(
            generations=tuple(generations),
            stops=form.stop,
            echoes=tuple(echoes) or ("",) * len(generations),
            stream=bool(form.stream),
            include_usage=include_timings or (options is not None and bool(options.include_usage)),
            continuous_usage=options is not None and bool(options.include_usage and options.continuous_usage_stats),
            include_timings=include_timings,
            include_drafts=include_timings or form.prediction is not None,
            plan=plan,
            decoder=decoder,
            eos_token_id=None if form.ignore_eos else self._tokenizer.eos_token_id,
            prompt_ids=prompt_ids,
            continues=continues,
            generates_nothing=form.max_tokens == 0,
        )


def _cache_salt(tenant: str, cache_salt: str | None) -> str:
    """The salt that separates a request's cached prefixes from those of others: a digest of its tenant and its own
    salt.

    A tenant is printable and contains no line end, so different pairs never give the same text; the digest keeps the
    salt within the wire protocol's bounds. Requests with neither tenant nor salt share their prefixes.
    """
    if not tenant and cache_salt is None:
        return ""
    return hashlib.sha256(f"{tenant}\n{cache_salt or ''}".encode()).hexdigest()
