"""Texts of one core whose masks are awaited."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

from common.engine.grammar import GrammarState
from common.worker.agenda import Agenda
from common.worker.events import AskMask, ForgetMask

_Subject = TypeVar("_Subject")


class MaskAsks(Generic[_Subject]):
    """Grammar states whose masks are being made → who waits for each."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._subjects: dict[GrammarState, _Subject] = {}

    def __len__(self) -> int:
        return len(self._subjects)

    def __contains__(self, state: GrammarState | None) -> bool:
        return state in self._subjects

    def subjects(self) -> Collection[_Subject]:
        """Whoever waits."""
        return self._subjects.values()

    def ask(
        self, subject: _Subject, grammar: str, state: GrammarState, token_ids: Sequence[int], prompt_len: int
    ) -> None:
        """Ask which tokens may follow `token_ids`, whose output begins at `prompt_len`."""
        self._subjects[state] = subject
        self._agenda.emit(AskMask(grammar, state, token_ids, prompt_len))

    def made(self, state: GrammarState) -> _Subject | None:
        """The mask is there, or will never be. Returns who waits for it; None if nobody does any more."""
        return self._subjects.pop(state, None)

    def forget(self, state: GrammarState | None) -> None:
        """The mask is not needed any more; inert if none is awaited."""
        if state is not None and self._subjects.pop(state, None) is not None:
            self._agenda.emit(ForgetMask(state))
