"""No docstring starts with "Of": a reader would have to look for the noun that it belongs to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COVERED = (
    "common/contract/*.py",
    "common/runtime/**/*.py",
    "common/engine/**/*.py",
    "kv_transfer/**/*.py",
    "gateway/**/*.py",
    "benchmarks/*.py",
    "benchmarks/load/*.py",
    "benchmarks/peers/**/*.py",
    "prefill_worker/**/*.py",
    "decode_worker/**/*.py",
    "benchmarks/gpu/**/*.py",
)
"""Globs of the files that are checked: the packages whose docstrings have been rewritten. Add a package once it is
clean."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each string that stands alone: the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield node.lineno, text


def lines_with_of(source: str) -> list[int]:
    """The lines of docstrings that start with "Of"."""
    return [line for line, text in docstrings(source) if text.split()[:1] == ["Of"]]


@pytest.mark.parametrize("pattern", COVERED)
def test_no_docstring_starts_with_of(pattern: str) -> None:
    paths = sorted(ROOT.glob(pattern))
    assert paths, f"no file matches {pattern}"
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in lines_with_of(path.read_text())]
    assert not found, f'docstrings that start with "Of": {", ".join(found)}'


def test_the_check_finds_docstrings_of_modules_functions_and_attributes() -> None:
    source = '"""Of a module."""\nx = 1\n"""Of a\nsequence."""\n'
    source += 'def f():\n    """\n    Of it."""\n    return "Of no interest"\n'
    assert lines_with_of(source) == [1, 3, 6]
    assert lines_with_of('"""Offers blocks."""\nx = 1\n"""A part of it."""\n') == []
