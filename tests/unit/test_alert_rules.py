"""The rules of the component `rules`, by Prometheus' own checker: tests/alert_cases.yaml says what follows."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from metric_names import documents, queries
from needs import require

from gateway.observability.metrics import GatewayMetrics

ROOT = Path(__file__).parents[2]
RULES = [ROOT / "k8s" / "components" / "rules" / name for name in ("scaling-rules.yaml", "alert-rules.yaml")]
CASES = yaml.load((ROOT / "tests" / "alert_cases.yaml").read_text(), yaml.BaseLoader)
"""Everything is text: 0x79 is no number of YAML's."""
GATEWAYS = [{"pod": "g1"}, {"pod": "g2"}, {"pod": "g3"}]
SCRAPE_S = 15

Labels = frozenset[tuple[str, str]]
Series = dict[tuple[str, Labels], tuple[str, ...]]


def promtool(*arguments: str | Path) -> str:
    """What it prints."""
    require("promtool")
    env = os.environ | {"GOGC": "off", "GOMEMLIMIT": "500MiB"}  # so small a program needs no garbage collection
    done = subprocess.run(["promtool", *arguments], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@cache
def groups() -> list[dict[str, Any]]:
    return [group for path in RULES for group in yaml.safe_load(path.read_text())["spec"]["groups"]]


def names(kind: str) -> list[str]:
    return [rule[kind] for group in groups() for rule in group["rules"] if kind in rule]


def only(wanted: set[str]) -> list[dict[str, Any]]:
    """These rules, and what is recorded for them; the others take most of promtool's time."""
    by_name = {rule.get("alert") or rule["record"]: rule for group in groups() for rule in group["rules"]}
    found: set[str] = set()
    while wanted - found:
        name = (wanted - found).pop()
        found.add(name)
        wanted = wanted | {record for record in names("record") if record in by_name[name]["expr"]}
    kept = [(group, [r for r in group["rules"] if (r.get("alert") or r["record"]) in found]) for group in groups()]
    return [group | {"rules": rules} for group, rules in kept if rules]


# --- series ----------------------------------------------------------------------------------------------------------


def parsed(selector: str) -> tuple[str, list[tuple[str, str, str]]]:
    """A name and its matchers."""
    name, _, rest = selector.partition("{")
    return name, re.findall(r'(\w+)(=~|=)"([^"]*)"', rest)


@cache
def values(pattern: str) -> tuple[str, ...]:
    """The samples of promtool's `a+bxn` and `axn`, one after the other."""
    samples: list[str] = []
    for part in pattern.split():
        start, step, times = re.fullmatch(r"([\d.]+)(?:\+([\d.]+))?(?:x(\d+))?", part).groups("0")  # type: ignore[union-attr]
        samples += [f"{float(start) + index * float(step):.10g}" for index in range(int(times) + 1)]
    return tuple(samples)


def healthy() -> Series:
    """Of one namespace."""
    series: Series = {}
    for selector, pattern in CASES["healthy"].items():
        name, matchers = parsed(selector)
        choices = [[{label: value} for value in text.split("|")] for label, _, text in matchers]
        if "GATEWAYS" in selector:
            choices.append(GATEWAYS)
        for each in itertools.product(*choices):
            labels = {label: value for part in each for label, value in part.items()}
            series[name, frozenset(labels.items())] = values(pattern)
    return series


def fits(labels: Labels, matchers: list[tuple[str, str, str]]) -> bool:
    own = dict(labels)
    return all(
        own.get(label) == text if operator == "=" else re.fullmatch(text, own.get(label, "")) is not None
        for label, operator, text in matchers
    )


def seconds(duration: str) -> int:
    return sum(int(number) * {"m": 60, "s": 1}[unit] for number, unit in re.findall(r"(\d+)([ms])", duration))


def changed(case: Mapping[str, Any]) -> Series:
    """The series of the namespace in which something happens."""
    series = healthy()
    for selector, pattern in case.get("set", {}).items():
        name, matchers = parsed(selector)
        fitting = [key for key in series if key[0] == name and fits(key[1], matchers)]
        assert fitting, f"{selector} is of no series"
        for key in fitting:
            assert pattern == "null" or values(pattern) != series[key], f"{selector} changes nothing"
            if pattern == "null":
                del series[key]
            else:
                series[key] = values(pattern)
    for how in ("down", "gone"):
        for pod, since in case.get(how, {}).items():
            index = seconds(since) // SCRAPE_S
            for (name, labels), samples in series.items():
                if ("pod", pod) in labels:
                    answers = how == "down" and name == "up"
                    after = ("0",) * len(samples[index:]) if answers else ("stale",)
                    series[name, labels] = samples[:index] + after
    return series


def input_series(case: Mapping[str, Any], text: str, num_samples: int) -> Iterator[dict[str, str]]:
    """The series whose names are in `text`, with so many samples: reading all takes most of promtool's time."""
    for namespace, series in (("a", changed(case)), ("b", healthy())):
        for (name, labels), samples in series.items():
            if name in text:
                written = ", ".join(
                    f'{label}="{value}"' for label, value in [("namespace", namespace), *sorted(labels)]
                )
                yield {"series": f"{name}{{{written}}}", "values": " ".join(samples[:num_samples])}


def run(tmp_path: Path, case: Mapping[str, Any], tests: Mapping[str, list[dict[str, Any]]]) -> None:
    """promtool's test of one case, with the rules that it is about and those that they need."""
    rules, test = tmp_path / "rules.yaml", tmp_path / "test.yaml"
    about = {each["alertname"] for each in tests.get("alert_rule_test", ())}
    about |= {name for each in tests.get("promql_expr_test", ()) for name in names("record") if name in each["expr"]}
    text = json.dumps({"groups": only(about)})
    rules.write_text(text)
    end_s = max(seconds(each["eval_time"]) for of_kind in tests.values() for each in of_kind)
    series = input_series(case, text + json.dumps(tests), end_s // SCRAPE_S + 1)
    document = {
        "rule_files": [rules.name],
        "evaluation_interval": "30s",  # the operator's own
        "tests": [{"interval": f"{SCRAPE_S}s", "input_series": list(series), **tests}],
    }
    test.write_text(json.dumps(document))
    promtool("test", "rules", test)


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(json.dumps({"groups": groups()}))
    assert f"{len(names('alert')) + len(names('record'))} rules found" in promtool("check", "rules", rules)


def test_rules_name_what_they_select_and_look_at_no_later_sample() -> None:
    """Else `run` would leave out what they see."""
    for rule in (rule for group in groups() for rule in group["rules"]):
        assert re.search(r"(?<![\w:]){|__name__|offset\s*-|@", rule["expr"]) is None, rule


@pytest.mark.parametrize(
    ("record", "metric"),
    [
        ("baton:ttft_seconds:p90", "vllm:time_to_first_token_seconds_bucket"),
        ("baton:itl_seconds:p90", "vllm:inter_token_latency_seconds_bucket"),
    ],
)
def test_quantiles_are_compared_with_bounds_of_buckets(record: str, metric: str) -> None:
    """Between two bounds a quantile is interpolated: it may exceed a threshold though all values are below."""
    compared = {float(number) for path in RULES for number in re.findall(rf"{record} > ([\d.]+)", path.read_text())}
    told = GatewayMetrics("m").exposition().decode()
    assert len(compared) == 2
    assert compared <= {float(bound) for bound in re.findall(rf'{metric}{{.*?le="([^"]+)"', told)}


@pytest.mark.processes
def test_prometheus_takes_the_queries_of_the_dashboard_and_of_autoscalers(tmp_path: Path) -> None:
    asked = [
        re.sub(r"\$\w+", "a", expression.replace("$__rate_interval", "5m"))
        for _, expression in queries(documents(ROOT / "k8s"))
    ]
    rules = tmp_path / "rules.yaml"
    recorded = [{"record": f"query:{number}", "expr": expression} for number, expression in enumerate(asked)]
    rules.write_text(json.dumps({"groups": [{"name": "queries", "rules": recorded}]}))
    assert f"{len(asked)} rules found" in promtool("check", "rules", rules)


@pytest.mark.processes
@pytest.mark.parametrize("at", ["2m", "30m", "40m"])
def test_a_healthy_deployment_is_silent(tmp_path: Path, at: str) -> None:
    silent = [{"eval_time": at, "alertname": name, "exp_alerts": []} for name in names("alert")]
    run(tmp_path, {}, {"alert_rule_test": silent})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, cases in CASES["alerts"].items() for number in range(len(cases))]
)
def test_an_alert_fires_when_it_should(tmp_path: Path, name: str, number: int) -> None:
    case = CASES["alerts"][name][number]
    own = [{"exp_labels": case["fires"], "exp_annotations": {"summary": case["summary"]}}] if "fires" in case else []
    others = set(names("alert")) - {name, *case.get("also", ())} if "fires" in case else set()
    expected = [{"eval_time": case["at"], "alertname": name, "exp_alerts": own}]
    expected += [{"eval_time": case["at"], "alertname": other, "exp_alerts": []} for other in sorted(others)]
    run(tmp_path, case, {"alert_rule_test": expected})


def test_every_alert_has_cases_in_which_it_fires_and_nearby_ones_in_which_it_does_not() -> None:
    assert sorted(CASES["alerts"]) == sorted(names("alert"))
    for name, cases in CASES["alerts"].items():
        assert {"fires" in case for case in cases} == {True, False}, name


@pytest.mark.processes
@pytest.mark.parametrize("number", range(len(CASES["recorded"])))
def test_recorded_rules(tmp_path: Path, number: int) -> None:
    case = CASES["recorded"][number]
    expected = []
    for selector, value in case["is"].items():
        name, matchers = parsed(selector)
        written = ", ".join(f'{label}="{text}"' for label, _, text in [*matchers, ("namespace", "=", "a")])
        samples = [] if value == "null" else [{"labels": f"{{{written}}}", "value": float(value)}]
        expected.append({"expr": f"round({name}{{{written}}}, 0.001)", "eval_time": case["at"], "exp_samples": samples})
    run(tmp_path, case, {"promql_expr_test": expected})


@pytest.mark.processes
def test_a_namespace_does_not_see_the_other(tmp_path: Path) -> None:
    samples = [
        {"labels": f'{{namespace="{namespace}"}}', "value": value} for namespace, value in (("a", 3.2), ("b", 0.8))
    ]
    test = {"expr": "round(baton:prefill_workers:wanted, 0.001)", "eval_time": "30m", "exp_samples": samples}
    case = {"set": {"baton_engine_busy_seconds_total": "0+18x160"}}
    run(tmp_path, case, {"promql_expr_test": [test]})


def test_the_documentation_says_what_to_do_for_each_alert() -> None:
    text = (ROOT / "docs" / "operations" / "monitoring.md").read_text()
    section = text.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    assert [name for name, _, _ in rows] == names("alert")
    assert all(meaning.strip() and action.strip() for _, meaning, action in rows)
