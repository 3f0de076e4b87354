"""Writes the state diagrams of `docs/architecture/` anew from the tables in the code.

    python tests/state_diagrams.py

A diagram stands between a comment that names its table and one that says `end`.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from common.runtime.state_tables import diagram

PAGES = Path(__file__).parent.parent / "docs" / "architecture"
_PLACE = re.compile(r"(<!-- (?P<module>[a-z_.]+)\.(?P<table>[A-Z_]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def tables(text: str) -> list[str]:
    """Names of the tables whose diagrams a page has."""
    return [f"{found['module']}.{found['table']}" for found in _PLACE.finditer(text)]


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
