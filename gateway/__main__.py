"""`baton gateway`: one gateway."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from common.contract.errors import OperatorError
from common.contract.ids import new_incarnation
from common.contract.messages.session import Role
from common.contract.tiers import Tier
from common.runtime.checkpoint import config_hash, context_tokens, read_config, resolve_model, size_in
from common.runtime.clock import monotonic
from common.runtime.config import GatewaySettings, load
from common.runtime.curve import CurveKeys
from common.runtime.lifecycle import (
    Announcer,
    collector_paused,
    end_with_parent,
    exit_on_operator_error,
    freeze_startup_objects,
    leave,
    run,
)
from common.runtime.logs import configure_logging
from common.runtime.resolver import Resolver
from gateway.access.api_keys import Keyring
from gateway.access.connections import ConnectionBounds, Listener, allow_connections
from gateway.access.hosts import called_by
from gateway.access.ports import BoundPort
from gateway.api import create_app, create_runner
from gateway.api_settings import ApiSettings, Limits, SamplingDefaults, version
from gateway.dashboard.admin_link import AdminLink
from gateway.dashboard.handlers import Dashboard
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.ttft_limits import TtftLimits
from gateway.observability.metrics import GatewayMetrics
from gateway.operators.admin import create_admin_app
from gateway.text.tokenizer import ModelTokenizer, keep_torch_out
from gateway.web.ending import ENDING, GOODBYE_S
from gateway.web.tls import ServerTls
from gateway.workers.discovery import LONGEST_LOOKUP_S, Discovery, DnsSource, WorkerSource
from gateway.workers.registry import Registry

if TYPE_CHECKING:
    from gateway.observability.tracing import Tracing

log = logging.getLogger(__name__)

_ADMIN_BOUNDS = ConnectionBounds(max_connections=64)
_MOST_DIGITS = 640
"""Most digits of an integer in JSON, the least that Python allows: it reads and writes them in quadratic time."""


def api_settings_of(settings: GatewaySettings, folder: Path) -> ApiSettings:
    """The API's settings, from the gateway's settings and the model in `folder`. Raises `OperatorError`."""
    config = read_config(folder)
    vocab_size, context = size_in(config, "vocab_size", folder), context_tokens(config, folder)
    most = settings.max_model_len or context
    if most > context:
        raise OperatorError(f"--max-model-len: {most} is more than the model's context, {context}")
    names = tuple(dict.fromkeys(settings.served_model_name)) or (settings.model.rstrip("/"),)
    limits = Limits(
        max_sequence_tokens=most,
        max_body_bytes=settings.max_body_bytes,
        max_in_flight=settings.max_in_flight,
        request_budget_s=settings.request_budget_s,
    )
    return ApiSettings(
        model_name=names[0],
        other_names=names[1:],
        model_vocab_size=vocab_size,
        limits=limits,
        sampling_defaults=SamplingDefaults.from_model(folder),
        targets=settings.targets,
        tenant_header=settings.tenant_header,
        explain_routing=settings.explain_routing,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        cors_origins=settings.cors_origins,
        allowed_hosts=called_by(settings.allowed_hosts, host=settings.host, has_keys=settings.api_keys is not None),
    )


def system_fingerprint_of(model_hash: str, tokenizer: ModelTokenizer, defaults: SamplingDefaults) -> str:
    """An identifier that changes when the same request with the same seed may get another answer, as far as a gateway
    can tell: it knows no weights, and does not tell commits of one version apart."""
    templates = [tokenizer.chat_template(with_tools) for with_tools in (False, True)]
    known = repr((version(), model_hash, templates, defaults))
    return "fp_" + hashlib.sha256(known.encode()).hexdigest()[:12]


def _secrets(settings: GatewaySettings, metrics: GatewayMetrics) -> tuple[Keyring | None, ServerTls | None]:
    """Load the API keys and the certificate. Raises `OperatorError`."""
    keyring = tls = None
    if settings.api_keys is not None:
        keyring = Keyring(Path(settings.api_keys), reloaded=partial(metrics.reloaded, "api_keys"))
        for key in keyring.keys:
            if key.tenant_from_header and settings.tenant_header is None:
                log.warning("API key %s: tenant_from_header has no effect without --tenant-header", key.name)
    if settings.tls_cert is not None and settings.tls_key is not None:
        tls = ServerTls(Path(settings.tls_cert), Path(settings.tls_key), reloaded=partial(metrics.reloaded, "tls"))
    return keyring, tls


def open_tracing(settings: GatewaySettings, metrics: GatewayMetrics) -> Tracing | None:
    """The sender of traces; None if no collector is configured. Raises `OperatorError`."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from gateway.observability.tracing import Tracing
    except ImportError as error:
        raise OperatorError(f"--otlp-endpoint needs the packages of Baton's extra 'otel': {error}") from error
    tracing = Tracing.to(settings.otlp_endpoint)
    metrics.registry.register(tracing)
    return tracing


def bounds_of(settings: GatewaySettings) -> ConnectionBounds:
    """The bounds on client connections of the settings."""
    return ConnectionBounds(
        max_connections=settings.max_connections,
        header_timeout_s=settings.header_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
    )


def ttft_limits_of(settings: GatewaySettings) -> TtftLimits:
    """The admission with the limits of the settings."""
    return TtftLimits(
        {
            Tier.INTERACTIVE: settings.interactive_limit_s,
            Tier.STANDARD: settings.standard_limit_s,
            Tier.BATCH: settings.batch_limit_s,
        }
    )


def _dispatcher(settings: GatewaySettings, model_hash: str) -> Dispatcher:
    """The dispatcher of the settings. Raises `OperatorError`."""
    registry = Registry(
        settings.prefill_workers,
        settings.decode_workers,
        model_hash,
        colocated=not settings.prefill_workers and settings.prefill_service is None,
        stall_s=settings.engine_stall_s,
    )
    return Dispatcher(
        new_incarnation(),
        registry,
        monotonic,
        settings.pulse,
        local_prefill_tokens=settings.local_prefill_tokens,
        targets=settings.targets,
        max_prefix_names=settings.prefix_index_names,
        ttft_limits=ttft_limits_of(settings),
        patience_s=settings.patience_s,
        silence_s=settings.silence_s,
        keys=CurveKeys.load(settings.curve_keys),
    )


async def _sources(settings: GatewaySettings, stack: AsyncExitStack) -> dict[Role, WorkerSource]:
    """Discovery sources by role; empty if all workers are named. Raises `OperatorError`."""
    services = {Role.PREFILL: settings.prefill_service, Role.DECODE: settings.decode_service}
    named = {role: service for role, service in services.items() if service is not None}
    period_s = settings.discovery_period_s
    if settings.discovery != "kubernetes":
        places = {role: service.rpartition(":") for role, service in named.items()}
        resolver = Resolver(LONGEST_LOOKUP_S)
        return {role: DnsSource(host, int(port), period_s, resolver) for role, (host, _, port) in places.items()}
    try:
        from gateway.workers.endpoint_slices import EndpointSliceSource, open_api
    except ImportError as error:
        raise OperatorError(
            f"--discovery kubernetes needs the packages of Baton's extra 'kubernetes': {error}"
        ) from error
    api, namespace = await open_api(settings.kubernetes_namespace)
    stack.push_async_callback(api.close)
    return {role: EndpointSliceSource(api, namespace, service, resync_s=period_s) for role, service in named.items()}


def _tokenizer(settings: GatewaySettings, folder: Path, model_hash: str) -> ModelTokenizer:
    """Load the tokenizer of the model in `folder`, whose `config_hash` was `model_hash`. Raises `OperatorError`, also
    if that has changed meanwhile: workers with the earlier hash have another tokenizer."""
    with collector_paused():
        template = settings.chat_template
        tokenizer = ModelTokenizer.load(folder, None if template is None else Path(template))
    if config_hash(folder) != model_hash:
        raise OperatorError(f"{folder} has changed while the model was loaded")
    return tokenizer


async def serve(settings: GatewaySettings, folder: Path, stop: asyncio.Event) -> None:
    """Bind, load, connect, and serve until `stop`. Raises `OperatorError`, and whatever ends the links or the
    discovery: open requests then end with an error at once."""
    async with AsyncExitStack() as stack:
        await _serve(settings, folder, stop, stack)


async def _serve(settings: GatewaySettings, folder: Path, stop: asyncio.Event, stack: AsyncExitStack) -> None:
    # The signal asks other servers to read their files again: this one does so anyway.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    announcer = Announcer(settings.announce_fd)
    model_hash = config_hash(folder)
    dispatcher = _dispatcher(settings, model_hash)
    api_settings = api_settings_of(settings, folder)
    metrics = GatewayMetrics(api_settings.model_name)
    metrics.registry.register(dispatcher)
    tracing = open_tracing(settings, metrics)
    dashboard = None
    if settings.dashboard == "on":
        dashboard = Dashboard(dispatcher, api_settings, metrics)
    keyring, tls = _secrets(settings, metrics)
    port = await BoundPort.open(stack, settings.host, settings.port)
    admin_port = None
    if settings.admin_port is not None:
        admin_port = await BoundPort.open(stack, settings.admin_host, settings.admin_port, "the admin port ")
    tokenizer = _tokenizer(settings, folder, model_hash)
    fingerprint = system_fingerprint_of(model_hash, tokenizer, api_settings.sampling_defaults)
    app = create_app(
        dispatcher,
        tokenizer,
        replace(api_settings, system_fingerprint=fingerprint),
        metrics,
        keyring=keyring,
        traces=tracing,
        dashboard=dashboard,
    )
    runner = create_runner(app, shutdown_timeout_s=settings.shutdown_grace_s)
    await runner.setup()
    admin_app = create_admin_app(dispatcher.links, settings.admin_host)
    admin = web.AppRunner(admin_app, access_log=None, handle_signals=False, shutdown_timeout=GOODBYE_S)
    await admin.setup()
    allow_connections(settings.max_connections)
    listener = Listener(runner, bounds_of(settings), metrics, None if tls is None else tls.context)
    admin_listener = Listener(admin, _ADMIN_BOUNDS)
    working = list[asyncio.Task[None]]()
    try:
        url = port.listen(listener, "http" if tls is None else "https")
        log.info("HTTP on %s", url)
        admin_url = None
        if admin_port is not None:
            admin_url = admin_port.listen(admin_listener)
            log.info("admin on %s", admin_url)
            if dashboard is not None:
                dashboard.admin = AdminLink(settings.admin_host, admin_listener.port)
        working.append(asyncio.create_task(dispatcher.links.run()))
        if settings.discovery != "static":
            discovery = Discovery(await _sources(settings, stack), metrics.registry, monotonic)
            working.append(asyncio.create_task(discovery.run(dispatcher.links.follow)))
        for task in working:
            task.add_done_callback(lambda _: app[ENDING].fail())
        freeze_startup_objects()  # not once it is ready: it serves while a pool is empty, and that may be for days
        stopping = asyncio.create_task(stop.wait())
        usable = asyncio.create_task(dispatcher.links.wait_usable())
        await asyncio.wait([*working, stopping, usable], return_when=asyncio.FIRST_COMPLETED)
        if usable.done():
            announcer.say(url=url, admin=admin_url, dashboard=f"{url}/" if dashboard is not None else None, ready=True)
            log.info("ready")
            await asyncio.wait([*working, stopping], return_when=asyncio.FIRST_COMPLETED)
        usable.cancel()
        for task in working:
            if task.done():
                task.result()
    finally:
        await listener.close()
        await admin_listener.close()
        await runner.cleanup()
        await admin.cleanup()
        if tracing is not None:
            await tracing.close()
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


def main() -> None:
    """Entry point."""
    sys.set_int_max_str_digits(_MOST_DIGITS)

    def body() -> None:
        settings = load(GatewaySettings, "baton gateway", sys.argv[1:])
        configure_logging(settings.log_level, "baton gateway", settings.log_format)
        end_with_parent(settings.end_with_parent)
        if settings.discovery == "static" and not settings.decode_workers:
            raise OperatorError(
                "baton gateway: --decode-workers must name at least one; without --prefill-workers they compute the "
                "prompts too"
            )
        twice = set(settings.prefill_workers) & set(settings.decode_workers)
        if twice:
            raise OperatorError(f"baton gateway: {', '.join(sorted(twice))} is named as prefill and as decode worker")
        if settings.explain_routing:
            log.info("--explain-routing: x-baton-* headers tell every client the workers' addresses")
        keep_torch_out()
        folder = resolve_model(settings.model, settings.revision, weights=False)
        run(lambda stop: serve(settings, folder, stop))

    # It ends without waiting for threads, which may be busy with a long text.
    try:
        exit_on_operator_error(body)
    except Exception:
        log.exception("the gateway ends")
        leave(1)
    leave()


if __name__ == "__main__":
    main()
