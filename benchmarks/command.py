"""The command line of a module, declared by the parameters of a function; and a measurement's lines and its record.

A keyword-only parameter is an option, any other is an argument; its type is that of the parameter. `Literal` has the
choices, a tuple takes several words, `Annotated[TYPE, "..."]` has the help. `--help` tells all of them, and anything
else is an error; `scratch` is not an option. Uses the standard library alone.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from benchmarks.record import clean_tree, limit_instructions, limited_to, record


class UsageError(Exception):
    """The options do not fit."""


def call(
    function: Callable[..., Any],
    doc: str | None,
    arguments: Sequence[str] | None = None,
    *,
    options_of: Callable[..., Any] | None = None,
) -> Any:
    """What `function` returns for the command line, which has its parameters, and those of `options_of`.

    Its `UsageError` becomes an error of the command line.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for each in filter(None, (options_of, function)):
        hints = get_type_hints(each, include_extras=True)
        for name, parameter in inspect.signature(each).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD or name == "scratch":
                continue
            told, option = _told_of(hints[name]), f"--{name.replace('_', '-')}"
            if parameter.kind is not parameter.KEYWORD_ONLY:
                parser.add_argument(name, **told)
            elif parameter.default is parameter.empty:
                parser.add_argument(option, required=True, **told)
            else:
                parser.add_argument(option, default=parameter.default, **told)
    values = vars(parser.parse_args(arguments))
    try:
        return function(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except UsageError as error:
        parser.error(str(error))


def _told_of(hint: Any) -> dict[str, Any]:
    """What argparse is told of a parameter of this type."""
    if get_origin(hint) is Annotated:
        return {**_told_of(get_args(hint)[0]), "help": hint.__metadata__[0]}
    kinds = get_args(hint)
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Literal:
        return {"choices": kinds}
    if get_origin(hint) is tuple:
        return {**_told_of(kinds[0]), "nargs": "+" if kinds[-1] is ... else len(kinds)}
    if kinds:  # of an option that may be None
        return _told_of(next(kind for kind in kinds if kind is not type(None)))
    return {"type": hint}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a measurement records."""

    name: str
    """The name of the record."""
    figures: dict[str, Any]
    workload: Mapping[str, Any] = field(default_factory=dict)
    """What there is besides the options."""
    seed: int | None = 0
    """The seed if there is no such option; None if nothing is drawn at random."""
    peers: dict[str, Any] | None = None


def run(measure: Callable[..., Result | Iterator[Result]], doc: str | None) -> Result:
    """Entry point of a measurement, a function of a folder for temporary files and of its options: measure, print, and
    record the result with the options as its workload. Of several results, each replaces the one before."""

    def entry(
        *,
        no_record: Annotated[bool, "print only"] = False,
        instructions: Annotated[
            Literal["avx2", "avx512-bf16"] | None, "the widest to use: as if the CPU had no others"
        ] = None,
        **options: Any,
    ) -> Result:
        if instructions is not None:
            limit_instructions(instructions)
        result = path = None
        measured = clean_tree()
        with TemporaryDirectory() as scratch:
            made = measure(Path(scratch), **options)
            for result in made if isinstance(made, Iterator) else (made,):
                path = None if no_record else keep(result, options, measured)
        if result is None:
            raise SystemExit("nothing was measured")
        show("", result.figures)
        print(path or "not recorded")
        return result

    result: Result = call(entry, doc, options_of=measure)
    return result


def keep(result: Result, options: Mapping[str, Any], measured: dict[str, str]) -> Path:
    """Record the result of the tree that was `measured`; return the path."""
    workload = {**options, **result.workload}
    seed = workload.pop("seed", result.seed)
    limit = limited_to()
    name = result.name if limit is None or result.name.endswith(f"-as-{limit}") else f"{result.name}-as-{limit}"
    return record(name, workload=workload, figures=result.figures, seed=seed, peers=result.peers, measured=measured)


def show(name: str, figures: Mapping[str, Any]) -> None:
    """Print figures, a line for each group of them; lists are left out."""
    if any(not _is_group(value) for value in figures.values()):
        print(line_of(name, figures), flush=True)
    for key, value in figures.items():
        if _is_group(value) and isinstance(value, Mapping):
            show(f"{name} {key}".strip(), value)


def line_of(name: str, figures: Mapping[str, Any]) -> str:
    """The figures that are no groups, in a line."""
    told = (f"{key} {_told(value)}" for key, value in figures.items() if not _is_group(value))
    return f"{name:<27} {'  '.join(told)}"


def _is_group(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, Mapping) and "p50" not in value)


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{value[name]:.4g}" for name in ("p50", "p99", "max") if name in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
