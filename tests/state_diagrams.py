"""Writes the state diagrams of `docs/architecture/` anew from the tables in the code.

    python tests/state_diagrams.py

A diagram stands between a comment that names its table and one that says `end`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parent.parent / "docs" / "architecture"
_PLACE = re.compile(r"(<!-- (?P<module>[a-z_.]+)\.(?P<table>[A-Z_]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def tables(text: str) -> list[str]:
    """Names of the tables whose diagrams a page has."""
    return [f"{found['module']}.{found['table']}" for found in _PLACE.finditer(text)]


def diagram(table: Mapping[Any, Mapping[Any, Any]]) -> str:
    """The table as a state diagram for Mermaid. The first state of the table is the initial one."""
    rows = [f"    [*] --> {next(iter(table))}"]
    for state, events in table.items():
        names: dict[str, list[str]] = {}
        for event, after in events.items():
            names.setdefault(after, []).append(event)
        rows += [f"    {state} --> {after}: {', '.join(each)}" for after, each in names.items()]
        if not events:
            rows.append(f"    {state} --> [*]")
    return "\n".join(["```mermaid", "stateDiagram-v2", *rows, "```"])


def redrawn(text: str) -> str:
    """The page with each diagram as its table is now."""

    def draw(found: re.Match[str]) -> str:
        table = getattr(importlib.import_module(found["module"]), found["table"])
        return f"{found[1]}{diagram(table)}\n{found[4]}"

    return _PLACE.sub(draw, text)


def main() -> None:
    """Entry point."""
    for page in PAGES.glob("*.md"):
        page.write_text(redrawn(page.read_text()))


if __name__ == "__main__":
    main()
