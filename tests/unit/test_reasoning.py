"""Reasoning is split off in time that grows with its length; what is split off is tested in `test_answer_cuts`."""

from __future__ import annotations

import pytest

from gateway.text.reasoning import CLOSING, OPENING, ReasoningSplitter


@pytest.mark.parametrize("before", ["", OPENING, OPENING + "hm", OPENING + "hm" + CLOSING])
@pytest.mark.parametrize("blank", ["\n\n\n\n", " </thin", "\n<"])
def test_what_is_held_back_is_not_looked_at_again(before: str, blank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_chars = 0

    def counted(name: str) -> None:
        inner = getattr(ReasoningSplitter, name)

        def count(splitter: ReasoningSplitter, text: str) -> object:
            nonlocal num_chars
            num_chars += len(text)
            return inner(splitter, text)

        monkeypatch.setattr(ReasoningSplitter, name, count)

    counted("_before")
    counted("_reasoning")
    splitter = ReasoningSplitter(opened=False)
    parts = splitter.push(before)
    for _ in range(2000):
        parts += splitter.push(blank)
        assert all(len(value) < 20 for value in vars(splitter).values() if isinstance(value, str))
    parts += splitter.push("x") + splitter.finish()
    assert num_chars < 2000 * (len(blank) + len(CLOSING)) + 20
    expected = blank * 2000 + "x"
    said = before.replace(OPENING, "").replace(CLOSING, "")
    kept = expected if before in ("", OPENING + "hm") else expected.lstrip()
    assert "".join(text for _, text in parts) == said + kept
