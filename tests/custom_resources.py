"""Schemas of the custom resources in `k8s/`: the fields that we use, and no others, as their projects document them.

(Prometheus Operator, "API reference": PodMonitor, PrometheusRule. KEDA, "ScaledObject specification" and "Prometheus
scaler".)
"""

from __future__ import annotations

from typing import Any

import jsonschema

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string", "minLength": 1}
_WORDS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_SECONDS: Schema = {"type": "integer", "minimum": 0}
_DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))+$"}


def _object(required: str = "", **properties: Schema) -> Schema:
    made: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return made | {"required": required.split()}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of, "minItems": 1}


_SELECTOR = _object(
    matchLabels=_WORDS,
    matchExpressions=_list(_object("key operator", key=_TEXT, operator=_TEXT, values=_list(_TEXT))),
)
_POD_MONITOR = _object(
    "selector podMetricsEndpoints",
    selector=_SELECTOR,
    podMetricsEndpoints=_list(
        _object(
            "port",
            port=_TEXT,
            path=_TEXT,
            interval=_DURATION,
            scheme={"enum": ["http", "https"]},
            tlsConfig=_object(insecureSkipVerify={"type": "boolean"}),
            relabelings=_list(
                _object(
                    action={"enum": ["replace", "keep", "drop", "labeldrop", "labelkeep"]},
                    sourceLabels=_list(_TEXT),
                    regex=_TEXT,
                    targetLabel=_TEXT,
                )
            ),
        )
    ),
)
_RULE: Schema = {
    "oneOf": [
        _object("record expr", record=_TEXT, expr=_TEXT, labels=_WORDS),
        _object("alert expr labels annotations", alert=_TEXT, expr=_TEXT, labels=_WORDS, annotations=_WORDS)
        | {
            "properties": {
                "alert": _TEXT,
                "expr": _TEXT,
                "for": _DURATION,
                "labels": _WORDS,
                "annotations": _WORDS,
            }
        },
    ]
}
_PROMETHEUS_RULE = _object(
    "groups", groups=_list(_object("name rules", name=_TEXT, interval=_DURATION, rules=_list(_RULE)))
)
_POLICIES = _list(
    _object(
        "type value periodSeconds",
        type={"enum": ["Pods", "Percent"]},
        value={"type": "integer", "minimum": 1},
        periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
    )
)
_PACE = _object(
    "policies",
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy={"enum": ["Max", "Min", "Disabled"]},
    policies=_POLICIES,
)
_SCALED_OBJECT = _object(
    "scaleTargetRef triggers",
    scaleTargetRef=_object("name", name=_TEXT, apiVersion=_TEXT, kind=_TEXT),
    pollingInterval=_SECONDS,
    cooldownPeriod=_SECONDS,
    minReplicaCount={"type": "integer", "minimum": 0},
    maxReplicaCount={"type": "integer", "minimum": 1},
    fallback=_object(
        "failureThreshold replicas",
        failureThreshold={"type": "integer", "minimum": 0},
        replicas={"type": "integer", "minimum": 0},
        behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
    ),
    triggers=_list(
        _object(
            "type metadata",
            type={"const": "prometheus"},
            metricType={"enum": ["AverageValue", "Value"]},
            metadata=_object(
                "serverAddress query threshold",
                serverAddress=_TEXT,
                query=_TEXT,
                threshold=_TEXT,
                ignoreNullValues={"enum": ["true", "false"]},
            ),
        )
    ),
    advanced=_object(
        horizontalPodAutoscalerConfig=_object(behavior=_object(scaleUp=_PACE, scaleDown=_PACE)),
    ),
)
KINDS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): _POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): _PROMETHEUS_RULE,
    ("keda.sh/v1alpha1", "ScaledObject"): _SCALED_OBJECT,
}


def is_custom(each: dict[str, Any]) -> bool:
    """Whether Kubernetes itself has no schema of it."""
    return "." in each["apiVersion"].partition("/")[0] and not each["apiVersion"].partition("/")[0].endswith(".k8s.io")


def validate(each: dict[str, Any]) -> None:
    """Raises `jsonschema.ValidationError`, or `KeyError` for a kind that is not known."""
    metadata = _object("name", name=_TEXT, namespace=_TEXT, labels=_WORDS, annotations=_WORDS)
    schema = _object(
        "apiVersion kind metadata spec",
        apiVersion=_TEXT,
        kind=_TEXT,
        metadata=metadata,
        spec=KINDS[each["apiVersion"], each["kind"]],
    )
    jsonschema.validate(each, schema)
