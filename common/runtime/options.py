"""Reads the settings of a program from its command line and its environment; errors are readable for operators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsConfigDict, SettingsError

from common.contract.errors import OperatorError

Settings = TypeVar("Settings", bound=BaseSettings)


def with_prefix(env_prefix: str) -> SettingsConfigDict:
    """The configuration of a settings class: kebab-case options, `--no-` forms of flags, variables with the prefix."""
    return SettingsConfigDict(
        env_prefix=env_prefix,
        extra="forbid",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
    )


def load_options(
    cls: type[Settings],
    program: str,
    arguments: Sequence[str],
    family: Iterable[type[BaseSettings]],
    foreign: Callable[[str], bool] = lambda name: False,
) -> Settings:
    """Settings from `arguments`, else from environment variables, else the defaults.

    `--help` prints and exits. Raises `OperatorError` for an unknown option, for a bad value, and for a variable that
    has the prefix, belongs to no class of the `family` and is not `foreign`.
    """
    _refuse_unknown_variables(cls.model_config.get("env_prefix", ""), family, foreign)
    try:
        source = CliSettingsSource[Any](cls, cli_prog_name=program, cli_exit_on_error=False)
        return CliApp.run(cls, cli_args=list(arguments), cli_settings_source=source)
    except ValidationError as error:
        problems = "; ".join(f"{_option(e['loc'])}{e['msg']}" for e in error.errors())
        raise OperatorError(f"{program}: {problems}") from error
    except SettingsError as error:
        raise OperatorError(f"{program}: {error}") from error


def _option(location: tuple[int | str, ...]) -> str:
    return f"--{str(location[0]).replace('_', '-')}: " if location else ""


def _refuse_unknown_variables(
    prefix: str, family: Iterable[type[BaseSettings]], foreign: Callable[[str], bool]
) -> None:
    known = {(prefix + name).upper() for settings in family for name in settings.model_fields}
    unknown = sorted(name for name in os.environ if name.startswith(prefix) and name not in known and not foreign(name))
    if unknown:
        raise OperatorError(f"unknown environment variable {', '.join(unknown)}")
