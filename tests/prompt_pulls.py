"""Pulls of prompts, as a decode worker begins them."""

from __future__ import annotations

from common.contract.ids import RequestKey
from common.contract.messages.gateway import Source
from common.contract.messages.handoff import Attach
from kv_transfer.pull import Pull


def pull_of_prompt(key: RequestKey, at: Source) -> Pull:
    """The pull of a request's own prompt, from the Prefill of the same attempt."""
    return Pull(at, Attach(request=key.request, attempt=key.attempt, offered=key.attempt))
