"""Every link of the documents to a file of this repository, and to a heading, leads somewhere; and the walk through the
code in docs/architecture.md is as short as it says."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "docs/architecture", "docs/decisions", "docs/operations", "k8s", "common/demo_model")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"((?:docs/[\w./-]+|[A-Z]{5,})\.md)\b`?(?:,? \(?\"([^\"\n]+)\")?")
"""A document that a comment, a string or a text names by its path from the root, and the heading that may follow it."""


def anchor_of(heading: str) -> str:
    """The anchor that a renderer gives to a heading."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that a renderer gives to the headings of a page, and those that it sets itself."""
    found: set[str] = set()
    text = CODE.sub("", page.read_text())
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        anchor = anchor_of(heading)
        found.add(anchor if anchor not in found else f"{anchor}-1")
    return found | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


def dead(page: Path, text: str) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in (a or b for a, b in LINK.findall(CODE.sub("", text))):
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert dead(page, page.read_text()) == []


def test_a_dead_link_is_found() -> None:
    text = "[a](docs/none.md) [b](README.md#none) [c](#none) [d](docs/operations.md) [e](https://example.org/none)"
    assert dead(ROOT / "README.md", text) == ["docs/none.md", "README.md#none", "#none"]


def test_documents_and_headings_that_are_named_exist() -> None:
    missing = set()
    for pattern in ("**/*.py", "**/*.md", "**/*.yaml", "**/*.js", "**/*.sh", "pyproject.toml", "Makefile"):
        for file in ROOT.glob(pattern):
            if file == Path(__file__) or any(part.startswith((".", "node_")) for part in file.relative_to(ROOT).parts):
                continue
            for name, heading in NAMED.findall(file.read_text()):
                page = next((each for each in (ROOT / name, file.parent / name) if each.is_file()), None)
                if page is None or (heading and anchor_of(heading) not in anchors(page)):
                    missing.add(f"{file.relative_to(ROOT)}: {name} {heading}")
    assert missing == set()


def test_the_walk_through_the_code_is_as_short_as_it_says() -> None:
    """Counts may be a little behind the files, but not far."""
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## One request through the code")[2]
    rows = {path: int(lines) for path, lines in re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", section, re.MULTILINE)}
    actual = {path: len((ROOT / path).read_text().splitlines()) for path in rows}
    assert len(rows) >= 5
    assert sum(actual.values()) <= 4000
    assert {path for path, lines in rows.items() if abs(lines - actual[path]) > 0.1 * actual[path]} == set()
