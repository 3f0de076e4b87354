"""The order in which files of tests are dealt out to processes."""

from __future__ import annotations

import pytest

FIRST = (
    # Files that take long, the longest first: those whose processes wait, in turns with those that compute.
    "e2e/test_restarts.py",
    "unit/test_engine_native.py",
    "chaos/test_cells.py",
    "kernels/test_kernels_invariant.py",
    "e2e/test_serve.py",
    "unit/test_ranks.py",
    "e2e/test_dashboard_page.py",
    "kernels/test_kernels_attention.py",
    "e2e/test_transport_processes.py",
    "model/test_handoff_search.py",
    "e2e/test_exposure.py",
    "unit/test_alert_rules.py",
    "e2e/test_gpu_stack_benchmark.py",
    "unit/test_autoscale.py",
    "e2e/test_hostile_input.py",
    "unit/test_manifests.py",
    "e2e/test_waterfall.py",
    "unit/test_gpu_runner.py",
    "e2e/test_dashboard_chat.py",
    "property/test_schemathesis.py",
    "e2e/test_tool_calls.py",
    "property/test_decode_scheduler_model.py",
    "chaos/test_soak.py",
    "kernels/test_kernels_model.py",
    "e2e/test_step_overhead_benchmark_streams.py",
    "unit/test_transports.py",
    "e2e/test_kv_crosses.py",
    "unit/test_decode_traffic.py",
    "e2e/test_gateway_benchmark_streams.py",
    "kernels/test_kernels_sampler.py",
    "e2e/test_drain.py",
    "unit/test_structured_output.py",
    # Pools that several files use end where files of other folders follow.
    "e2e/test_speculation.py",
    "e2e/test_widths.py",
    "e2e/test_startup.py",
    "e2e/test_drawn_requests.py",
    "e2e/test_prefix_pulls.py",
    "e2e/test_handoff.py",
    "e2e/test_memory_pressure.py",
    "e2e/test_profiles.py",
    "e2e/test_structured_output.py",
    "e2e/test_parity.py",
)
"""The others follow as they are collected; `make test` has those of `tests/unit`, which take a second or two, last."""
_PLACES = {name: place for place, name in enumerate(FIRST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first."""
    items.sort(key=lambda item: _PLACES.get(f"{item.path.parent.name}/{item.path.name}", len(FIRST)))
