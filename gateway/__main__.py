"""`baton gateway`: one gateway."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from aiohttp import web

from common.contract.errors import OperatorError
from common.contract.ids import new_incarnation
from common.runtime.checkpoint import config_hash, read_config, resolve_model
from common.runtime.clock import monotonic
from common.runtime.config import GatewaySettings, load
from common.runtime.curve import CurveKeys
from common.runtime.lifecycle import (
    Announcer,
    configure_logging,
    end_with_parent,
    exit_on_operator_error,
    freeze_startup_objects,
    run,
)
from gateway.admin import create_admin_app
from gateway.api import create_app, create_runner
from gateway.api_settings import ApiSettings, Limits, SamplingDefaults
from gateway.dispatcher import Dispatcher
from gateway.metrics import GatewayMetrics
from gateway.registry import Registry
from gateway.tokenizer import ModelTokenizer, keep_torch_out

log = logging.getLogger(__name__)


def _api_settings(settings: GatewaySettings, folder: Path) -> ApiSettings:
    config = read_config(folder)
    try:
        vocab_size, context = int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as error:
        raise OperatorError(f"{folder / 'config.json'} lacks a usable {error}") from error
    limits = Limits(
        max_sequence_tokens=context,
        max_body_bytes=settings.max_body_bytes,
        max_in_flight=settings.max_in_flight,
        default_budget_s=settings.request_budget_s,
    )
    return ApiSettings(
        model_name=settings.served_model_name or settings.model.rstrip("/"),
        model_vocab_size=vocab_size,
        limits=limits,
        sampling_defaults=SamplingDefaults.from_model(folder),
        tenant_header=settings.tenant_header,
    )


async def _serve_admin(settings: GatewaySettings, runner: web.AppRunner) -> str | None:
    """Bind the operators' port, if there is to be one; its URL. Raises `OperatorError`."""
    if settings.admin_port is None:
        return None
    try:
        await web.TCPSite(runner, settings.admin_host, settings.admin_port).start()
    except OSError as error:
        place = f"{settings.admin_host}:{settings.admin_port}"
        raise OperatorError(f"cannot bind the admin port {place}: {error.strerror or error}") from error
    url = f"http://{settings.admin_host}:{runner.addresses[0][1]}"
    log.info("admin on %s", url)
    return url


async def serve(settings: GatewaySettings, folder: Path, stop: asyncio.Event) -> None:
    """Bind, connect, serve until `stop`. Raises `OperatorError`."""
    announcer = Announcer(settings.announce_fd)
    registry = Registry(
        settings.prefill_workers, settings.decode_workers, config_hash(folder), stall_s=settings.engine_stall_s
    )
    dispatcher = Dispatcher(
        new_incarnation(),
        registry,
        monotonic,
        settings.pulse,
        local_prefill_tokens=settings.local_prefill_tokens,
        prefix_index_blocks=settings.prefix_index_blocks,
        patience_s=settings.patience_s,
        keys=CurveKeys.load(settings.curve_keys),
    )
    api_settings = _api_settings(settings, folder)
    metrics = GatewayMetrics(api_settings.model_name)
    metrics.registry.register(dispatcher)
    app = create_app(dispatcher, ModelTokenizer.load(folder), api_settings, metrics)
    runner = create_runner(app, shutdown_timeout_s=settings.shutdown_grace_s)
    await runner.setup()
    admin = web.AppRunner(create_admin_app(dispatcher), access_log=None, handle_signals=False)
    await admin.setup()
    try:
        try:
            await web.TCPSite(runner, settings.host, settings.port).start()
        except OSError as error:
            raise OperatorError(f"cannot bind {settings.host}:{settings.port}: {error.strerror or error}") from error
        port = runner.addresses[0][1]
        log.info("HTTP on %s:%d", settings.host, port)
        admin_url = await _serve_admin(settings, admin)
        dispatching = asyncio.create_task(dispatcher.run())
        stopping = asyncio.create_task(stop.wait())
        usable = asyncio.create_task(dispatcher.wait_usable())
        await asyncio.wait([dispatching, stopping, usable], return_when=asyncio.FIRST_COMPLETED)
        if usable.done():
            freeze_startup_objects()
            announcer.say(url=f"http://{settings.host}:{port}", admin=admin_url, ready=True)
            log.info("ready")
            await asyncio.wait([dispatching, stopping], return_when=asyncio.FIRST_COMPLETED)
        usable.cancel()
        if dispatching.done():
            dispatching.result()
    finally:
        await runner.cleanup()
        await admin.cleanup()
    dispatching.cancel()
    await asyncio.gather(dispatching, return_exceptions=True)


def main() -> None:
    """Entry point."""

    def body() -> None:
        settings = load(GatewaySettings, "baton gateway", sys.argv[1:])
        configure_logging(settings.log_level, "baton gateway")
        end_with_parent(settings.end_with_parent)
        if not settings.decode_workers:
            raise OperatorError(
                "baton gateway: --decode-workers must name at least one; without --prefill-workers they compute the "
                "prompts too"
            )
        twice = set(settings.prefill_workers) & set(settings.decode_workers)
        if twice:
            raise OperatorError(f"baton gateway: {', '.join(sorted(twice))} is named as prefill and as decode worker")
        keep_torch_out()
        folder = resolve_model(settings.model, weights=False)
        run(lambda stop: serve(settings, folder, stop))

    exit_on_operator_error(body)


if __name__ == "__main__":
    main()
