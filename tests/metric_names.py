"""Metrics by name: those that the queries of `k8s/` ask for, those that docs/operations/monitoring.md lists, those that
a process exports; and what is wrong with a query that asks for one that is not there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from prometheus_client.parser import text_string_to_metric_families

Document = dict[str, Any]
TARGET_LABELS = frozenset({"namespace", "pod", "component", "profile", "container", "instance", "job"})
"""Of whatever is scraped, by the PodMonitors and their operator."""
_GROUPING = ("by", "without", "on", "ignoring", "group_left", "group_right")
_OPERATORS = {"and", "or", "unless", "bool", "offset", "atan2", "inf", "nan"}
_AGGREGATORS = {"sum", "min", "max", "avg", "group", "count", "stddev", "stdvar", "topk", "bottomk", "quantile"}
_TOKEN = re.compile(r"""\s+|\#.*|("[^"]*"|'[^']*')|(\d[\w.]*)|(\$\{?\w+\}?)|([A-Za-z_:][\w:]*)|([=!]~|!=|==|.)""")
_SUFFIXES = {"_bucket": frozenset({"le"}), "_sum": frozenset(), "_count": frozenset()}


# --- what exists -----------------------------------------------------------------------------------------------------


class Family(NamedTuple):
    """A metric, by the name that its samples have, but for a histogram's suffixes."""

    kind: str
    labels: frozenset[str] | None
    """None where it has no sample yet."""


Families = Mapping[str, Family]


def exported(exposition: str) -> dict[str, Family]:
    """By a process, as its `/metrics` says."""
    families = {}
    for family in text_string_to_metric_families(exposition):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = [frozenset(sample.labels) - {"le"} for sample in family.samples]
        families[name] = Family(family.type, frozenset().union(*labels) if labels else None)
    return families


def documented(page: str) -> dict[str, dict[str, Family]]:
    """By role, in the tables of the section "Metrics"."""
    section = page.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    gateway, _, workers = section.partition("\n### Workers\n")
    rows = [(names, "gateway", kind) for names, kind in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", gateway, re.M)]
    rows += re.findall(r"^\| (`[^|]+) \| (P|D|P, D) \| ([^|]+) \|", workers, re.M)
    roles = {"gateway": ["gateway"], "P": ["prefill"], "D": ["decode"], "P, D": ["prefill", "decode"]}
    families: dict[str, dict[str, Family]] = {"gateway": {}, "prefill": {}, "decode": {}}
    for names, where, kind in rows:
        for name in re.findall(r"`([^`]+)`", names):
            labels = set(re.findall(r"`(\w+)`", kind)) | ({"model_name"} if name.startswith("vllm:") else set())
            for role in roles[where]:
                assert name not in families[role], f"{name} has two rows"
                families[role][name] = Family(kind.partition(",")[0].strip(), frozenset(labels))
    return families


def labels_of(name: str, families: Families) -> frozenset[str] | None:
    """Of a sample's name, those of its target included. Raises `KeyError` where there is no such sample."""
    for suffix, more in (("", frozenset[str]()), *_SUFFIXES.items()):
        family = families.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
        if family is not None and (family.kind == "histogram") == bool(suffix):
            return None if family.labels is None else family.labels | more | TARGET_LABELS
    raise KeyError(name)


# --- what is asked for -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric in a query, with the labels that it is selected by, and the components that it is asked of."""

    name: str
    labels: frozenset[str] = frozenset()
    components: tuple[str, ...] = ()


@dataclass(slots=True)
class Query:
    """What is in a query."""

    selectors: list[Selector] = field(default_factory=list)
    grouping: set[str] = field(default_factory=set)
    """The labels in `by (…)`, `on (…)` and the like."""


def parse(expression: str) -> Query:
    """A query of PromQL, as far as it names metrics and labels; promtool says whether it is one at all."""
    tokens = [match for match in _TOKEN.finditer(expression) if match.lastindex]
    texts = [match.group() for match in tokens]
    query, at = Query(), 0
    while at < len(texts):
        text, following = texts[at], texts[at + 1] if at + 1 < len(texts) else ""
        at += 1
        if text == "[":
            at = texts.index("]", at) + 1
        elif text in _GROUPING:
            end = texts.index(")", at)
            query.grouping.update(each for each in texts[at + 1 : end] if each != ",")
            at = end + 1
        elif text == "{":
            raise ValueError(f"a selector without a name: {expression}")
        elif tokens[at - 1].lastindex == 4 and text.lower() not in _OPERATORS | _AGGREGATORS and following != "(":
            end = texts.index("}", at) if following == "{" else at - 1
            query.selectors.append(_selector(text, texts[at + 1 : end]))
            at = end + 1
    return query


def _selector(name: str, matchers: list[str]) -> Selector:
    parts = [each for each in matchers if each != ","]
    asked = {parts[i]: (parts[i + 1], parts[i + 2].strip("\"'")) for i in range(0, len(parts), 3)}
    operator, value = asked.get("component", ("", ""))
    return Selector(name, frozenset(asked), tuple(value.split("|")) if operator in ("=", "=~") else ())


def documents(k8s: Path) -> list[Document]:
    """Everything in these folders' files, as it is written: objects, values of charts, dashboards."""
    found: list[Document] = [json.loads(path.read_text()) for path in sorted(k8s.glob("**/*.json"))]
    for path in sorted(k8s.glob("**/*.yaml")):
        found += [each for each in yaml.safe_load_all(path.read_text()) if each]
    return found


def rules(all_documents: Iterable[Document]) -> Iterator[Document]:
    """Of Prometheus, in their order."""
    for each in all_documents:
        if each.get("kind") == "PrometheusRule":
            yield from (rule for group in each["spec"]["groups"] for rule in group["rules"])


def _external(all_documents: Iterable[Document]) -> Iterator[Document]:
    """What an adapter serves to autoscalers."""
    for each in all_documents:
        if "kind" not in each and isinstance(each.get("rules"), dict):
            yield from each["rules"].get("external", ())


def queries(all_documents: list[Document]) -> Iterator[tuple[str, str]]:
    """Who asks, and what."""
    for rule in rules(all_documents):
        yield rule.get("alert") or rule["record"], rule["expr"]
    for rule in _external(all_documents):
        yield rule["name"]["as"], rule["seriesQuery"]
    for each in all_documents:
        if each.get("kind") == "ScaledObject":
            for trigger in each["spec"]["triggers"]:
                yield f"ScaledObject/{each['metadata']['name']}", trigger["metadata"]["query"]
        for panel in each.get("panels", ()):
            yield from ((f"panel {panel['title']!r}", target["expr"]) for target in panel.get("targets", ()))
        for variable in each.get("templating", {}).get("list", ()):
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable.get("definition", ""))
            if found is not None:
                yield f"variable {variable['name']!r}", f"count by ({found[2]}) ({found[1]})"


# --- what is wrong ---------------------------------------------------------------------------------------------------


def query_faults(all_documents: list[Document], families: Mapping[str, Families]) -> Iterator[str]:
    """A line for each metric that is neither recorded nor exported by the role it is asked of, and for each label that
    it does not have. `families` are the roles'."""
    recorded = {
        rule["record"]: TARGET_LABELS | parse(rule["expr"]).grouping
        for rule in rules(all_documents)
        if "record" in rule
    }
    for who, expression in queries(all_documents):
        query = parse(expression)
        if not query.selectors:
            yield f"{who}: it asks for nothing"
        known = set(TARGET_LABELS)
        for selector in query.selectors:
            for fault_or_labels in _labels(selector, recorded, families):
                if isinstance(fault_or_labels, str):
                    yield f"{who}: {fault_or_labels}"
                else:
                    known |= fault_or_labels
        for label in sorted(query.grouping - known):
            yield f"{who}: nothing that it asks for has the label {label}"
    served = {rule["name"]["as"] for rule in _external(all_documents)}
    for each in all_documents:
        if each.get("kind") == "HorizontalPodAutoscaler":
            for metric in (each["external"]["metric"]["name"] for each in each["spec"]["metrics"]):
                if metric not in served:
                    yield f"HorizontalPodAutoscaler/{each['metadata']['name']}: no adapter serves {metric}"


def _labels(
    selector: Selector, recorded: Mapping[str, frozenset[str]], families: Mapping[str, Families]
) -> Iterator[str | frozenset[str]]:
    """Its labels by whoever has it, and what is wrong with it."""
    name = selector.name
    if name == "up" or name in recorded:
        yield from _checked(selector, recorded.get(name, TARGET_LABELS), "")
        return
    if name.startswith("vllm:") and not selector.components:
        yield f"{name} is not asked of a component: servers of others have it, too"
    found = False
    for role in selector.components or families:
        try:
            labels = labels_of(name, families.get(role, {}))
        except KeyError:
            if selector.components:
                yield f"{name} is not exported by {role}"
            continue
        found = True
        if labels is None:
            yield f"{name} of {role} has no sample that would show its labels"
        else:
            yield from _checked(selector, labels, f" of {role}")
    if not found and not selector.components:
        yield f"{name} is neither recorded nor exported"


def _checked(selector: Selector, labels: frozenset[str], whose: str) -> Iterator[str | frozenset[str]]:
    yield labels
    for label in sorted(selector.labels - labels):
        yield f"{selector.name}{whose} has no label {label}"
