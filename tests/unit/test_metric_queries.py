"""Every metric that a rule, the dashboard or an autoscaler names is one that a role exports, or a rule records.

Roles export what docs/operations/monitoring.md lists: tests/e2e/test_metric_names.py holds it against processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
from metric_names import (
    TARGET_LABELS,
    Document,
    Family,
    Selector,
    documented,
    documents,
    exported,
    labels_of,
    parse,
    queries,
    query_faults,
    rules,
)

ROOT = Path(__file__).parents[2]
DOCUMENTS = documents(ROOT / "k8s")
FAMILIES = documented((ROOT / "docs" / "operations" / "monitoring.md").read_text())


def test_everything_that_is_asked_for_exists() -> None:
    assert list(query_faults(DOCUMENTS, FAMILIES)) == []


def test_the_queries_are_found() -> None:
    askers = {who for who, _ in queries(DOCUMENTS)}
    assert {"BatonPoison", "baton:prefill_workers:wanted", "baton_prefill_workers_wanted"} <= askers
    assert {"ScaledObject/baton-decode", "panel 'Requests'", "variable 'namespace'"} <= askers


def test_no_metric_has_a_label_that_its_target_would_take() -> None:
    """The operator of Prometheus names the scraped port `endpoint`, unless that is dropped."""
    monitors = [each for each in DOCUMENTS if each.get("kind") == "PodMonitor"]
    relabelings = [port["relabelings"] for each in monitors for port in each["spec"]["podMetricsEndpoints"]]
    dropped = [{each["regex"] for each in steps if each["action"] == "labeldrop"} for steps in relabelings]
    assert len(dropped) == 2
    taken = TARGET_LABELS | ({"endpoint"} - set.intersection(*dropped))
    own = {
        role: {label for family in families.values() for label in family.labels or ()}
        for role, families in FAMILIES.items()
    }
    assert "endpoint" in own["gateway"]
    assert "profile" in own["gateway"], "which workers alone have from their pods"
    both = {role: (taken - {"profile"} if role == "gateway" else taken) & labels for role, labels in own.items()}
    assert not any(both.values()), both


def test_a_panel_names_the_datasource_and_the_namespace() -> None:
    (dashboard,) = [each for each in DOCUMENTS if "panels" in each]
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            for selector in parse(target["expr"]).selectors:
                assert "namespace" in selector.labels, target["expr"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    squares = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(squares)) == len(squares)
    assert max(x for x, _ in squares) == 23


# --- broken ones -----------------------------------------------------------------------------------------------------


def alert(name: str, expression: str) -> Callable[[list[Document]], None]:
    def change(all_documents: list[Document]) -> None:
        (rule,) = [rule for rule in rules(all_documents) if rule.get("alert") == name]
        rule["expr"] = expression

    return change


def panel(expression: str) -> Callable[[list[Document]], None]:
    def change(all_documents: list[Document]) -> None:
        (dashboard,) = [each for each in all_documents if "panels" in each]
        next(each for each in dashboard["panels"] if each["title"] == "Requests")["targets"][0]["expr"] = expression

    return change


def scaler(kind: str, *path: str | int, value: str) -> Callable[[list[Document]], None]:
    def change(all_documents: list[Document]) -> None:
        place = next(each for each in all_documents if each.get("kind") == kind)["spec"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def unrecorded(all_documents: list[Document]) -> None:
    next(rule for rule in rules(all_documents) if rule.get("record") == "baton:decode_workers:wanted")["record"] = "x"


BROKEN: dict[str, tuple[Callable[[list[Document]], None], str]] = {
    "a name": (
        alert("BatonQuarantine", "baton_blocks_in_quarantine > 0"),
        "BatonQuarantine: baton_blocks_in_quarantine is neither recorded nor exported",
    ),
    "a counter without its suffix": (
        panel("rate(baton_gateway_requests[5m])"),
        "panel 'Requests': baton_gateway_requests is neither recorded nor exported",
    ),
    "a histogram without one": (
        panel('vllm:time_to_first_token_seconds{component="gateway"}'),
        "vllm:time_to_first_token_seconds is not exported by gateway",
    ),
    "a role": (
        panel('sum(vllm:num_requests_swapped{component=~"prefill|decode"})'),
        "vllm:num_requests_swapped is not exported by prefill",
    ),
    "a name of others": (
        panel("sum(vllm:num_requests_running)"),
        "vllm:num_requests_running is not asked of a component",
    ),
    "a label": (
        alert("BatonPoison", 'increase(baton_gateway_requests_failed_total{reason="poison"}[5m]) > 0'),
        "BatonPoison: baton_gateway_requests_failed_total of gateway has no label reason",
    ),
    "a label to sum by": (
        panel("sum by (cause) (rate(baton_gateway_refused_total[5m]))"),
        "panel 'Requests': nothing that it asks for has the label cause",
    ),
    "a label of no bucket": (panel("sum by (le) (baton_decode_load)"), "nothing that it asks for has the label le"),
    "what is recorded no more": (
        unrecorded,
        "ScaledObject/baton-decode: baton:decode_workers:wanted is neither recorded nor exported",
    ),
    "what KEDA asks for": (
        scaler("ScaledObject", "triggers", 0, "metadata", "query", value="baton:prefill_workers"),
        "ScaledObject/baton-prefill: baton:prefill_workers is neither recorded nor exported",
    ),
    "what an autoscaler asks for": (
        scaler("HorizontalPodAutoscaler", "metrics", 0, "external", "metric", "name", value="wanted"),
        "HorizontalPodAutoscaler/baton-prefill: no adapter serves wanted",
    ),
    "nothing": (panel("vector(1)"), "panel 'Requests': it asks for nothing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_is_found(name: str) -> None:
    breaks, expected = BROKEN[name]
    changed = copy.deepcopy(DOCUMENTS)
    breaks(changed)
    found = list(query_faults(changed, FAMILIES))
    assert any(expected in fault for fault in found), found


# --- parts -----------------------------------------------------------------------------------------------------------


def test_names_are_told_from_everything_else_in_a_query() -> None:
    query = parse(
        """
        # not_a_metric
        label_replace(
          sum by (namespace, le) (rate(a_total{x="b{c}", component=~"prefill|decode"}[5m] offset 1m)) > bool 1e3
            and on (pod) b:c{component="gateway"} * on (pod) group_left (role) clamp_max(d, 3) or -e[$__rate_interval],
          "role", "$1", "", ""
        )
        """
    )
    assert query.selectors == [
        Selector("a_total", frozenset({"x", "component"}), ("prefill", "decode")),
        Selector("b:c", frozenset({"component"}), ("gateway",)),
        Selector("d"),
        Selector("e"),
    ]
    assert query.grouping == {"namespace", "le", "pod", "role"}


def test_a_selector_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="without a name"):
        parse('sum({component="gateway"})')


def test_what_a_process_exports_is_told_by_its_types() -> None:
    families = exported(
        "# HELP a_total x\n# TYPE a_total counter\n"
        '# HELP b x\n# TYPE b gauge\nb{role="x"} 1\n'
        '# HELP c x\n# TYPE c histogram\nc_bucket{stage="s",le="+Inf"} 1\nc_count{stage="s"} 1\nc_sum{stage="s"} 1\n'
    )
    assert families == {
        "a_total": Family("counter", None),
        "b": Family("gauge", frozenset({"role"})),
        "c": Family("histogram", frozenset({"stage"})),
    }
    assert "le" in (labels_of("c_bucket", families) or ())
    assert "le" not in (labels_of("c_count", families) or ())
    for missing in ("a", "b_count", "c"):
        with pytest.raises(KeyError):
            labels_of(missing, families)
