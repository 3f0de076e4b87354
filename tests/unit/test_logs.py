"""The log: as text, or one JSON object a line, whatever is in it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from common.runtime import logs
from common.runtime.logs import (
    MAX_MESSAGE_CHARS,
    MAX_TRACE_CHARS,
    JsonFormatter,
    TextFormatter,
    about,
    configure_logging,
)

LOG = logging.getLogger("baton.test")


@pytest.fixture
def restored() -> Iterator[None]:
    """The root logger is as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    before, shows_fields, record = logging._srcfile, logs._shows_fields, logging.getLogRecordFactory()
    yield
    logging._srcfile, logs._shows_fields = before, shows_fields
    logging.setLogRecordFactory(record)
    root.handlers[:] = handlers
    root.setLevel(level)


def written(monkeypatch: pytest.MonkeyPatch, log_format: str) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging("info", "baton test", log_format)  # type: ignore[arg-type]
    return stream


def test_a_line_is_one_object_with_its_fields(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = written(monkeypatch, "json")
    LOG.info("request %s: %s", "r1", "two\nlines", extra=about("routed", request="r1", attempt=2, decode=None))
    LOG.debug("not this")
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert told.pop("time").endswith("+00:00")
    assert told == {
        "level": "info",
        "process": "baton test",
        "logger": "baton.test",
        "message": "request r1: two\nlines",
        "event": "routed",
        "request": "r1",
        "attempt": 2,
        "decode": None,
    }


def test_fields_are_computed_for_a_format_that_shows_them(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0

    def more() -> dict[str, int]:
        nonlocal computed
        computed += 1
        return {"seconds": 3}

    for log_format, shown in (("text", 0), ("json", 1)):
        stream = written(monkeypatch, log_format)
        LOG.info("done", extra=about("finished", more, request="r1"))
        assert computed == shown
    told = json.loads(stream.getvalue())
    assert (told["event"], told["request"], told["seconds"]) == ("finished", "r1", 3)


def test_an_exception_stays_on_its_line(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = written(monkeypatch, "json")
    try:
        raise ValueError("why")
    except ValueError:
        LOG.exception("it broke")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["exception"].endswith("ValueError: why")


def test_a_field_hides_nothing_and_need_not_be_json() -> None:
    record = LOG.makeRecord("l", logging.INFO, "f", 1, "text", (), None, extra=about("e", level="x", odd={1}.pop))
    told = json.loads(JsonFormatter("p").format(record))
    assert (told["level"], told["message"], told["event"]) == ("info", "text", "e")
    assert isinstance(told["odd"], str)


def test_text_is_for_people(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = written(monkeypatch, "text")
    LOG.warning("request %s goes on", "r1", extra=about("failed_over", request="r1"))
    assert stream.getvalue().endswith(" WARNING baton test request r1 goes on\n")


async def test_the_lines_of_a_turn_are_written_together(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = written(monkeypatch, "text")
    writes: list[str] = []
    monkeypatch.setattr(stream, "write", writes.append)
    LOG.info("first")
    LOG.info("second")
    assert not writes
    await asyncio.sleep(0)
    assert [line.rpartition(" ")[2] for line in "".join(writes).splitlines()] == ["first", "second"]
    assert len(writes) == 1
    LOG.info("third")
    await asyncio.sleep(0)
    assert len(writes) == 2


async def test_a_warning_is_written_at_once_after_the_lines_before_it(
    restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = written(monkeypatch, "text")
    LOG.info("before")
    LOG.warning("now")
    await asyncio.to_thread(LOG.info, "thread")
    assert [line.rpartition(" ")[2] for line in stream.getvalue().splitlines()] == ["before", "now", "thread"]
    LOG.info("last")
    logging.shutdown()
    assert stream.getvalue().endswith(" last\n"), "no line is lost at the end of the process"


def test_each_line_has_its_own_time() -> None:
    formatter, theirs = TextFormatter("p"), logging.Formatter("%(asctime)s %(levelname)s p %(message)s")
    times = (1.5, 1.25, 61.999, 1.001)
    records = [LOG.makeRecord("l", logging.INFO, "f", 1, "text", (), None) for _ in times]
    for record, created in zip(records, times, strict=True):
        record.created, record.msecs = created, 1000 * (created % 1)
    assert [formatter.format(each) for each in records] == [theirs.format(each) for each in records]


FORGED = "2026-01-01 00:00:00,000 CRITICAL baton test the key is out"


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x0b", "\x1b[1A", "\x85", "\u2028"])
def test_words_from_outside_cannot_begin_a_line(end: str, restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = written(monkeypatch, "text")
    LOG.warning("a peer says: %s", f"x{end}{FORGED}")
    try:
        raise ValueError(f"x{end}{FORGED}")
    except ValueError:
        LOG.exception("it broke")
    text = stream.getvalue()
    first, second, *trace = text.split("\n")[:-1]
    assert first.isprintable()
    assert first.endswith(FORGED)
    assert second.endswith("it broke")
    assert trace
    assert all(line.startswith("    ") and line.isprintable() for line in trace)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_line_has_an_end(log_format: str, restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = written(monkeypatch, log_format)
    LOG.warning("a peer says: %s", "x\n" * 10**6)
    assert len(stream.getvalue()) < 10_000


HUGE = "x\n" * 500_000


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_exception_and_a_stack_have_an_end(log_format: str, restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their text is a megabyte."""
    stream = written(monkeypatch, log_format)
    try:
        raise ValueError("first words\n" + HUGE + "last words")
    except ValueError:
        LOG.exception("it broke")
    record = LOG.makeRecord("l", logging.INFO, "f", 1, "it stands", (), None, sinfo="first call\n" + HUGE + "last call")
    LOG.handle(record)
    text = stream.getvalue()
    assert all(words in text for words in ("first words", "last words", "first call", "last call"))
    assert text.count("characters)") == 2, "it says what was left out"
    bound = 2 * (MAX_MESSAGE_CHARS + MAX_TRACE_CHARS)
    assert len(text) < 4 * bound, "an indentation, or an escaped character, takes more than one"
    if log_format == "json":
        broke, stands = map(json.loads, text.splitlines())
        assert len(broke["exception"]) < MAX_TRACE_CHARS + 100
        assert len(stands["stack"]) < MAX_TRACE_CHARS + 100


@pytest.mark.parametrize(
    "value",
    [HUGE, HUGE.encode(), [HUGE], {"of": {"them": HUGE}}, ["x"] * 1_000_000, ValueError(HUGE)],
    ids=["text", "bytes", "list", "nested", "many", "object"],
)
def test_a_field_has_an_end(value: object, restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = written(monkeypatch, "json")
    LOG.info("short", extra=about("failed", first=1, why=value, last=[1, {"b": 2.5}]))
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert len(told["why"]) < MAX_MESSAGE_CHARS + 100
    assert told["why"].endswith("characters)")
    assert (told["first"], told["last"]) == (1, [1, {"b": 2.5}])


def test_words_of_other_languages_are_left_as_they_are(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = written(monkeypatch, "text")
    LOG.warning("tenant %s", "münchen 日本")
    assert stream.getvalue().endswith("tenant münchen 日本\n")
