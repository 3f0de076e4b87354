"""The sender of a request: its tenant, what it may ask for, and what it is charged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from aiohttp import web

from common.contract.tiers import Tier
from common.runtime.clock import Clock, monotonic
from gateway.access.api_keys import MAX_TENANT_CHARS, ApiKey, Keyring
from gateway.access.rate_limits import Allowance, KeyLimits, KeyMeter, Limit, LimitReached
from gateway.observability.metrics import GatewayMetrics
from gateway.web.http_errors import ApiError, invalid

_HEADERS: Final[Mapping[Limit, str]] = {Limit.REQUESTS: "requests", Limit.TOKENS: "tokens"}
"""Name of each rate limit in OpenAI's headers."""


class Caller:
    """The sender of one request. This base class is used without API keys and enforces nothing."""

    def __init__(self, tenant: str, key_name: str | None = None) -> None:
        self.tenant = tenant
        self.key_name = key_name
        """None if the gateway asks for no keys."""

    def request(self) -> AbstractContextManager[None]:
        """Context of the request, from admission to its end. Entering it raises `ApiError`, a 429."""
        return nullcontext()

    def check_tier(self, tier: Tier) -> None:
        """Raise `ApiError`, a 403, for a tier that this caller may not use."""

    def charge_ahead(self, num_tokens: int) -> None:
        """Charge the least tokens that a prompt can have, before it is tokenised. Raises as `charge_prompt` does."""

    def charge_prompt(self, num_tokens: int) -> None:
        """Charge a prompt of `num_tokens`, less what `charge_ahead` has charged already.

        Raises `ApiError`: a 429, or a 400 if waiting cannot help. A charge made before the refusal is kept, as the
        price of the work done.
        """

    def give_back(self, num_tokens: int) -> None:
        """Return the charge of a prompt that was refused before anything of it was computed."""

    def charge(self, num_tokens: int) -> None:
        """Charge generated tokens."""

    def headers(self) -> dict[str, str]:
        """Response headers that tell the caller its limits."""
        return {}


CALLER: Final = web.RequestKey("caller", Caller)
"""Request key under which an admitted request keeps its caller."""


def client_of(request: web.Request) -> str:
    """Identity of the client, for telling clients apart: the name of its API key, or else its address."""
    return request[CALLER].key_name or f"at {request.remote}"


class KeyCaller(Caller):
    """The holder of an API key."""

    def __init__(self, tenant: str, key: ApiKey, meter: KeyMeter, metrics: GatewayMetrics, clock: Clock) -> None:
        super().__init__(tenant, key.name)
        self._key = key
        self._meter = meter
        self._metrics = metrics
        self._clock = clock
        self._num_charged = 0
        """Tokens of the request's prompt that have been charged already."""

    @contextmanager
    def request(self) -> Iterator[None]:
        self._raise(self._meter.begin(self._clock()))
        try:
            yield
        finally:
            self._meter.end()

    def check_tier(self, tier: Tier) -> None:
        if self._key.tiers is not None and tier not in self._key.tiers:
            message = f"this API key may not use the tier {tier}, only {', '.join(self._key.tiers)}"
            raise ApiError(403, message, param="service_tier", code="tier_not_allowed")

    def charge_ahead(self, num_tokens: int) -> None:
        self.charge_prompt(num_tokens)
        self._num_charged = num_tokens

    def charge_prompt(self, num_tokens: int) -> None:
        most = self._meter.most_tokens
        if most is not None and num_tokens > most:
            message = f"a prompt of {num_tokens} tokens is more than the {most} tokens a minute of this API key"
            raise invalid(None, message, code=Limit.TOKENS)
        self._raise(self._meter.admit(num_tokens, self._clock(), self._num_charged))

    def give_back(self, num_tokens: int) -> None:
        self._meter.give_back(num_tokens, self._clock())

    def charge(self, num_tokens: int) -> None:
        self._meter.charge(num_tokens, self._clock())

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        for limit, allowance in self._meter.allowances(self._clock()).items():
            headers |= _rate_limit_headers(_HEADERS[limit], allowance)
        return headers

    def _raise(self, reached: LimitReached | None) -> None:
        if reached is None:
            return
        self._metrics.limited(self._key.name, reached.limit)
        message = f"this API key has reached its limit: {reached.limit}"
        if reached.wait_s is not None:
            message += f"; try again in {math.ceil(reached.wait_s)} s"
        raise ApiError(429, message, code=reached.limit, retry_after_s=reached.wait_s)


class Callers:
    """Identifies the caller of each request."""

    def __init__(
        self,
        keyring: Keyring | None,
        tenant_header: str | None,
        metrics: GatewayMetrics,
        clock: Clock = monotonic,
    ) -> None:
        """Without a keyring every request is admitted."""
        self._keyring = keyring
        self._tenant_header = tenant_header
        self._metrics = metrics
        self._clock = clock
        self._meters: dict[str, KeyMeter] = {}

    def identify(self, request: web.Request) -> Caller:
        """The caller of a request. Raises `ApiError`: a 401 without a valid key, a 400 for an invalid tenant header."""
        if self._keyring is None:
            return Caller(_named_tenant(request, self._tenant_header) or "")
        key = self._keyring.find(_given_key(request))
        if key is None:
            message = "a valid API key is needed: Authorization: Bearer ..., or x-api-key: ..."
            raise ApiError(401, message, code="invalid_api_key")
        tenant = _named_tenant(request, self._tenant_header) if key.tenant_from_header else None
        return KeyCaller(tenant or key.tenant or key.name, key, self._meter(key), self._metrics, self._clock)

    def knows(self, request: web.Request) -> bool:
        """Whether a request has a valid key, or none is needed."""
        return self._keyring is None or self._keyring.find(_given_key(request)) is not None

    def _meter(self, key: ApiKey) -> KeyMeter:
        """The meter of a key. Meters go by key name, so a key that replaces another of that name inherits its usage."""
        limits = KeyLimits(
            requests_per_minute=key.requests_per_minute,
            tokens_per_minute=key.tokens_per_minute,
            max_concurrency=key.max_concurrency,
        )
        meter = self._meters.get(key.name)
        if meter is None:
            assert self._keyring is not None
            names = {each.name for each in self._keyring.keys}
            if len(self._meters) >= 2 * len(names):  # as many names have left the file
                self._meters = {name: each for name, each in self._meters.items() if name in names or each.num_open}
                self._metrics.keep_keys(names)
            meter = self._meters[key.name] = KeyMeter(limits, self._clock())
        meter.set_limits(limits, self._clock())
        return meter


def _given_key(request: web.Request) -> str:
    """The key that the request authenticates with. Empty if it has none, if a header occurs twice, or if the two
    headers differ: then an intermediary may have added a key to the client's own."""
    bearers, bare = (request.headers.getall(name, []) for name in ("Authorization", "x-api-key"))
    if len(bearers) > 1 or len(bare) > 1:
        return ""
    keys = {key.strip() for key in bare}
    for header in bearers:
        scheme, _, given = header.partition(" ")
        keys.add(given.strip() if scheme.lower() == "bearer" else "")
    return keys.pop() if len(keys) == 1 else ""


def _named_tenant(request: web.Request, header: str | None) -> str | None:
    """The tenant that `header` names; None without one.

    Raises `ApiError`, a 400, for an invalid name, or if the header occurs twice: then an intermediary may have added a
    name to the client's own.
    """
    names = [] if header is None else request.headers.getall(header, [])
    if len(names) > 1:
        raise invalid(None, f"the header {header} must come once", code="invalid_tenant")
    tenant = names[0] if names else None
    if tenant is not None and (len(tenant) > MAX_TENANT_CHARS or not tenant.isprintable()):
        message = f"the header {header} must hold at most {MAX_TENANT_CHARS} printable characters"
        raise invalid(None, message, code="invalid_tenant")
    return tenant


def _rate_limit_headers(kind: str, allowance: Allowance) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{kind}": str(allowance.limit),
        f"x-ratelimit-remaining-{kind}": str(allowance.remaining),
        f"x-ratelimit-reset-{kind}": _duration(allowance.reset_s),
    }


def _duration(seconds: float) -> str:
    """A duration in OpenAI's notation: `17ms`, `1s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
