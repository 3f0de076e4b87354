"""Log texts in troubleshooting.md and faults.md are in the sources, and protocol.md names every packed field."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import get_type_hints

from common.contract.errors import Cause
from common.contract.messages import gateway, handoff, session, worker

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PRODUCT = ("common", "decode_worker", "gateway", "kv_transfer", "prefill_worker")
VALUES = (
    *Cause,
    "nixl",
    "zmq",
    "tcp",
    "shared_memory",
    "cma/memory",
    "API keys",
    "TLS files",
    "expandable_segments:True",
)
"""What a quoted text has where the sources have a variable, besides numbers."""
BREAK = re.compile(rf"…|: |\b(?:{'|'.join(VALUES)}|\d[\d.]*)\b")
"""Where a quoted text is cut into the parts that the sources have: at gaps, at values, and at ": ", where texts are put
together."""
FOREIGN = {"Invalid UCX_TLS=…", "stubs.c: Assertion '0' failed", "arbiter.c: Assertion", "ucp_request.inl: Fatal"}
"""Texts of NIXL and UCX."""


@cache
def sources() -> str:
    """The product's sources without docstrings, in which a string that is written in several lines is one."""
    files = [path.read_text() for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    return re.sub(r'"\s*\n\s*f?"', "", re.sub(r'""".*?"""', "", "\n".join(files), flags=re.DOTALL))


def quoted(page: str) -> set[str]:
    """The texts of several words that a page quotes: code that has a gap, or that stands in bold type."""
    text = " ".join(page.split())
    bold = " ".join(re.findall(r"\*\*.*?\*\*", text))
    codes = re.findall(r"`([^`]+)`", text)
    return {code for code in codes if " " in code and ("…" in code or f"`{code}`" in bold)} - FOREIGN


def not_in_sources(texts: set[str]) -> set[str]:
    """The texts of which the sources lack a part."""
    return {text for text in texts if any(part.strip() not in sources() for part in BREAK.split(text))}


def packed_fields() -> set[str]:
    """The fields of all messages, and of their parts, that travel as bytes."""
    classes = [each for module in (gateway, handoff, session, worker) for each in vars(module).values()]
    hints = [get_type_hints(each, include_extras=True) for each in classes if dataclasses.is_dataclass(each)]
    return {name for fields in hints for name, hint in fields.items() if "Packed(" in repr(hint)}


def test_the_texts_in_troubleshooting_are_those_of_the_product() -> None:
    texts = quoted((DOCS / "operations" / "troubleshooting.md").read_text())
    assert len(texts) > 20
    assert not_in_sources(texts) == set()


def test_the_lines_of_the_log_in_faults_are_those_of_the_product() -> None:
    lines = re.findall(r"^[A-Z]+ baton \w+ (.*)$", (DOCS / "faults.md").read_text(), re.MULTILINE)
    assert len(lines) == 6
    names = r"[0-9a-f]{32}|cmpl-|decode-0|signal SIGKILL"
    assert not_in_sources({re.sub(names, "…", line) for line in lines}) == set()


def test_a_text_that_the_product_does_not_have_is_found() -> None:
    page = "**`this worker connects only to addresses within --peer-networks`** … `goes on elsewhere: the source at …`"
    assert not_in_sources(quoted(page)) == quoted(page)
    assert len(quoted(page)) == 2


def test_the_protocol_names_every_packed_field() -> None:
    page = (DOCS / "protocol.md").read_text()
    (paragraph,) = re.findall(r"^\* (`token_ids`, .*?)^\* ", page, re.MULTILINE | re.DOTALL)
    assert {"token_ids", "checksums"} < packed_fields()
    assert packed_fields() - set(re.findall(r"`(\w+)`", paragraph)) == set()
