"""Every link of the documents to a file of this repository, and to a heading, leads somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "docs/decisions", "k8s", "common/demo_model")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"(?:docs/[\w./-]+|[A-Z]{5,})\.md\b")
"""A document that a comment, a string or a text names by its path from the root."""


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that a renderer gives to the headings of a page, and those that it sets itself."""
    found: set[str] = set()
    text = CODE.sub("", page.read_text())
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
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


def test_documents_that_are_named_exist() -> None:
    missing = set()
    for pattern in ("**/*.py", "**/*.md", "**/*.yaml", "**/*.js", "**/*.sh", "pyproject.toml", "Makefile"):
        for file in ROOT.glob(pattern):
            if file == Path(__file__) or any(part.startswith((".", "node_")) for part in file.relative_to(ROOT).parts):
                continue
            missing |= {
                f"{file.relative_to(ROOT)}: {name}"
                for name in NAMED.findall(file.read_text())
                if not (ROOT / name).is_file() and not (file.parent / name).is_file()
            }
    assert missing == set()
