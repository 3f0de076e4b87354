"""Ranks of a worker in processes of their own: what rank 0 computes with them, and how all of them end."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import rank_worker
import torch
from checkpoints import make_checkpoint
from fork_server import ForkedProcess, fork_server
from needs import require
from rank_worker import BLOCK_SIZE, PATIENT, PROMPT, decoded, load
from waiting import StandingClock

from common.contract.errors import OperatorError
from common.contract.kv_layout import Fingerprint
from common.contract.messages.worker import TokenScores
from common.contract.sampling import SamplingParams
from common.engine import ranks
from common.engine.batch import Ints, Sample, Slice
from common.engine.engine import Engine
from common.engine.engine_thread import EngineThread
from common.engine.native.group import GroupEndedError
from common.engine.orders import LeadingExecutor, _Order, compute_order, follow, rows_of
from common.engine.ragged import Rows
from common.engine.ranks import EXIT_RANK_LOST, GroupPlan, Ranks
from common.engine.runner import ModelRunner, load_runner
from common.runtime.clock import Pulse

ELSEWHERE = list(range(20, 30))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require("compiler")
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_key_value_heads=2)


@pytest.fixture(
    scope="module",
    params=[
        *((width, collectives, "cpu") for width, collectives in ((2, None), (2, "gloo"), (4, None))),
        pytest.param((2, "gloo", "cuda"), marks=pytest.mark.gpu),
    ],
    ids=str,
)
def pair(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """A worker alone, and one of several ranks, which add up in shared memory, or as those on GPUs do; two of them may
    share a GPU."""
    width, collectives, device = request.param
    alone, together = load(folder, 1, device=device), load(folder, width, collectives, device)
    yield alone, together
    together.close()


def test_copies_and_swaps_concern_the_blocks_of_all_ranks(pair: tuple[ModelRunner, ModelRunner]) -> None:
    alone, together = pair
    table = list(range(10))
    expected = decoded(alone, PROMPT, 20, table)
    assert decoded(together, PROMPT, 20, table) == expected
    for block, other in zip(table, ELSEWHERE, strict=True):
        together.copy_block(block, other)
    start = len(PROMPT) + 10
    assert decoded(together, expected[: start + 1], 9, ELSEWHERE, start) == expected
    together.swap_out([(block, slot) for slot, block in enumerate(table)])
    together.submit([])  # the swaps are over
    together.executor.clear(np.array(table))
    assert decoded(together, expected[: start + 1], 9, table, start) != expected, "the blocks are empty"
    together.swap_in([(slot, block) for slot, block in enumerate(table)])
    assert decoded(together, expected[: start + 1], 9, table, start) == expected


def test_log_probabilities_of_a_prompt_are_those_of_a_worker_alone(pair: tuple[ModelRunner, ModelRunner]) -> None:
    found = []
    for runner in pair:
        piece = Slice(token_ids=PROMPT, start=0, block_table=ELSEWHERE, scored=PROMPT[1:], num_alternatives=3)
        submitted = runner.submit([piece])
        submitted.outcomes()
        [scores] = submitted.scores()
        assert isinstance(scores, TokenScores)
        found.append(scores)
    alone, together = found
    assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert len(together.logprobs) == len(PROMPT) - 1


def test_steps_follow_tokens_that_only_rank_0_knows(pair: tuple[ModelRunner, ModelRunner]) -> None:
    """Steps that are planned before the tokens of the step before are known, as on a GPU."""
    found = []
    for runner in pair:
        params = SamplingParams(max_tokens=9, temperature=1.0, seed=3)
        submitted = []
        for step in range(4):
            position = len(PROMPT) + step
            samples = tuple(
                Sample(params=params, choice=choice, position=position, token_ids=PROMPT, prompt_len=len(PROMPT))
                for choice in range(2)
            )
            if not step:
                slices = [Slice(token_ids=PROMPT, start=0, block_table=ELSEWHERE, samples=samples)]
            else:
                both = [(ELSEWHERE, samples[:1], 1), (list(range(10)), samples[1:], 0)]
                slices = [
                    Slice(token_ids=[0], start=position - 1, block_table=table, samples=one, follows=before)
                    for table, one, before in both
                ]
            submitted.append(runner.submit(slices))
        found.append([each.outcomes() for each in submitted])
    assert found[0] == found[1]


async def test_a_step_in_which_no_block_is_moved_is_one_order(
    pair: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, together = pair
    executor = together.executor
    assert isinstance(executor, LeadingExecutor)
    told: list[int] = []
    tell = executor._orders.tell

    def watched(order: Sequence[Ints]) -> None:
        told.append(int(order[0]))
        tell(order)

    monkeypatch.setattr(executor._orders, "tell", watched)
    thread = EngineThread("engine")
    engine = Engine(thread, together, Fingerprint(config_hash="", weights_hash="", layout=together.layout))
    sample = Sample(params=SamplingParams(max_tokens=1), choice=0, position=2, token_ids=(1, 2), prompt_len=2)
    piece = Slice(token_ids=[1, 2], start=0, block_table=[3], samples=(sample,))
    await engine.finish(engine.submit([piece]))
    assert len(told) == 1
    told.clear()
    await engine.finish(engine.submit([piece], copies=[(3, 4)], swap_outs=[(3, 0)], swap_ins=[(0, 5)]))
    assert len(told) == 5, "a copy, two swaps, the step, and the wait for all ranks"
    thread.close()


@pytest.mark.parametrize("follows", [None, 1])
def test_rows_are_the_same_on_the_other_side(follows: int | None) -> None:
    sample = Sample(params=SamplingParams(max_tokens=1), choice=0, position=0, token_ids=(), prompt_len=0)
    slices = [
        Slice(token_ids=[5, 6, 7], start=6, block_table=[3, 1]),
        Slice(token_ids=[9], start=20, block_table=[4, 2, 7], samples=(sample,), follows=follows),
    ]
    rows = Rows.of(slices, BLOCK_SIZE)
    other, num_chosen, after_swaps = rows_of(np.concatenate([part.ravel() for part in compute_order(rows, 5, True)]))
    assert (num_chosen, after_swaps) == (5, True)
    assert rows.arrays.keys() == other.arrays.keys()
    for name, ours in rows.arrays.items():
        np.testing.assert_array_equal(ours, other.arrays[name], err_msg=name)
    np.testing.assert_array_equal(rows.follows_B, other.follows_B)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_cache_without_a_block_is_refused(folder: Path) -> None:
    with pytest.raises(OperatorError, match=r"does not hold one block: 16384 bytes for 16 tokens at 4 ranks"):
        load(folder, 4, kv_cache_bytes=5_000)


def test_without_a_compiler_there_are_no_groups(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "compiled", lambda: None)
    with pytest.raises(OperatorError, match="needs the kernels in C"):
        load(folder, 2)


def test_a_rank_that_is_not_started_ends_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: object) -> subprocess.Popen[bytes]:
        raise OSError("no more processes")

    monkeypatch.setattr(ranks, "_start", fail)
    with pytest.raises(OperatorError, match="a rank cannot be started: no more processes"):
        load(folder, 2)


def test_an_error_of_rank_0_is_told_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as the loss of a rank, which would end this process."""
    runner = load(folder, 2)

    def fail(*_: object) -> None:
        raise MemoryError("no memory for logits")

    monkeypatch.setattr(runner.executor.decoder, "logits", fail)
    with pytest.raises(MemoryError, match="no memory for logits"):
        decoded(runner, PROMPT, 1, list(range(10)))
    time.sleep(0.5)  # the others end meanwhile
    runner.close()


def test_a_cache_for_which_there_is_no_memory_is_refused(folder: Path) -> None:
    with pytest.raises(OperatorError, match="no memory for a KV cache of"):
        load(folder, 2, kv_cache_bytes=2**50)


WATCHED_RANK = """
import sys
from common.engine import ranks

def watched(name, call):
    def told(*arguments, **options):
        with open(sys.argv[2], "a") as file:
            print(name, file=file)
        return call(*arguments, **options)
    return told

ranks.backend_on = watched("backend_on", ranks.backend_on)
ranks.SharedGroup.add = watched("add", ranks.SharedGroup.add)
ranks.main()
"""
"""A rank that writes down some of its calls: it gets its arguments, and a file."""


def test_a_rank_has_its_backend_before_it_says_that_it_has_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on it may be silent for a second, and to load Triton from a cold disk may take longer."""
    calls = tmp_path / "calls"
    monkeypatch.setattr(
        ranks, "command_of", lambda module, arguments: [sys.executable, "-c", WATCHED_RANK, arguments, str(calls)]
    )
    load(folder, 2).close()
    assert calls.read_text().split()[:2] == ["backend_on", "add"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "how"),
    [("exit(7)", "with code 7"), ("import os; os.kill(os.getpid(), 9)", r"by signal 9 \(Killed\)")],
    ids=["code", "signal"],
)
def test_a_rank_that_cannot_start_ends_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, how: str
) -> None:
    monkeypatch.setattr(ranks, "_start", lambda arguments: subprocess.Popen([sys.executable, "-c", program]))
    with pytest.raises(OperatorError, match=f"rank 1 has ended {how}"):
        load(folder, 2)


FULL_RANK = """
import sys
from common.engine import ranks

def fails(*_):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: no room for weights")

ranks.load_weights = fails
ranks.main()
"""
"""A rank without memory for its part of the model."""


@pytest.mark.processes
def test_a_rank_without_memory_says_so_in_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "command_of", lambda module, arguments: [sys.executable, "-c", FULL_RANK, arguments])
    with pytest.raises(OperatorError, match="rank 1 has ended with code 2"):
        load(folder, 2)
    told = capfd.readouterr().err
    assert "error: rank 1: DefaultCPUAllocator: can't allocate memory: no room for weights\n" in told
    assert "Traceback" not in told


@pytest.mark.processes
def test_a_rank_that_is_lost_while_the_model_loads_ends_the_start_before_the_next_tensor(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = threading.Event()
    tell = Ranks._lost

    def lost(self: Ranks, why: str) -> None:
        tell(self, why)
        known.set()

    monkeypatch.setattr(Ranks, "_lost", lost)
    monkeypatch.setattr(ranks, "_start", lambda arguments: subprocess.Popen([sys.executable, "-c", "exit(7)"]))
    loaded: list[int] = []

    def progress(done: int, total: int) -> None:
        assert total == 21
        loaded.append(done)
        assert known.wait(60), "nobody has noticed that the rank has ended"

    plan = GroupPlan(width=2, num_threads=1, pulse=PATIENT)
    with pytest.raises(OperatorError, match="rank 1 has ended with code 7"):
        load_runner(folder, kv_cache_bytes=2**20, block_size=BLOCK_SIZE, progress=progress, group=plan)
    assert loaded in ([], [1]), "it is known at the latest after the first tensor"


@pytest.mark.processes
def test_only_rank_0_warns_of_what_a_model_lacks(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The other ranks have no handler that would write in the form of `--log-format`."""
    endless = shutil.copytree(folder, tmp_path / "endless")
    config = json.loads((endless / "config.json").read_text())
    (endless / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    caplog.set_level(logging.INFO)
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        (endless / name).unlink()
    load(endless, 2).close()
    warning = "names no end-of-sequence token"
    assert caplog.text.count(warning) == 1
    assert "rank 0 has loaded its part of the model, and waits for the other ranks" in caplog.text
    assert warning not in capfd.readouterr().err


# --- errors of a rank's device ---------------------------------------------------------------------------------------


class Work:
    """Something that a device is given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def wait(self) -> None:
        """Its end."""
        if self.error is not None:
            raise self.error


def test_an_error_of_a_ranks_device_ends_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though the rank waits for an order."""

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    marks: SimpleQueue[Any] = SimpleQueue()
    for work in (Work(), Work(RuntimeError("an illegal memory access"))):
        marks.put(work)
    with pytest.raises(SystemExit) as ended:
        ranks._wait_for(marks, torch.device("cpu"))
    assert (ended.value.code, marks.empty()) == (1, True)
    assert "an illegal memory access" in capsys.readouterr().err


def test_a_rank_marks_the_end_of_each_order() -> None:
    heard, marks = iter([_Order.WARM_UP, _Order.JOIN]), SimpleQueue[Any]()
    done: list[tuple[str, int]] = []

    def hear() -> Ints:
        try:
            return np.array([next(heard)])
        except StopIteration:
            raise GroupEndedError from None

    executor: Any = SimpleNamespace(
        cache=SimpleNamespace(device=torch.device("cpu")),
        warm_up=lambda: done.append(("warm_up", marks.qsize())),
        join=lambda: done.append(("join", marks.qsize())),
    )
    orders: Any = SimpleNamespace(hear=hear)
    with pytest.raises(GroupEndedError):
        follow(executor, orders, marks)
    assert done == [("warm_up", 0), ("join", 1)]
    assert marks.qsize() == 2


FAILING_DEVICE = """
import threading
from queue import SimpleQueue

import torch
from common.engine import ranks
from common.engine.host_copy import HostCopy

device = torch.device("cuda", 0)
marks = SimpleQueue()
threading.Thread(target=ranks._wait_for, args=(marks, device), daemon=True).start()
torch.cuda._sleep(10**9)
torch._assert_async(torch.zeros(1, device=device))
marks.put(HostCopy(device=device))
threading.Event().wait()
"""
"""A rank that waits for an order while its device fails."""


@pytest.mark.gpu
@pytest.mark.processes
def test_a_rank_whose_gpu_fails_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", FAILING_DEVICE], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "device-side assert" in ended.stderr


# --- the end ---------------------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """Processes of which `pid` is the parent."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def ended(pid: int) -> bool:
    """Whether a process is gone, or nobody has asked for its end yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


class Worker(ForkedProcess):
    """A worker of two ranks. Rank 0 is forked, rank 1 starts from nothing, as in production."""

    def __init__(self, folder: Path, pace: str) -> None:
        reader, writer = os.pipe()
        path = {"PYTHONPATH": os.pathsep.join([os.getcwd(), str(Path(rank_worker.__file__).parent)])}
        super().__init__(fork_server("worker"), "rank_worker", [str(folder), pace], writer, path, number=1)
        os.close(writer)
        self.stdout = os.fdopen(reader)
        assert self.stdout.readline() == "computed\n"


@pytest.fixture(scope="module")
def left() -> Iterator[dict[str, Worker]]:
    """Workers that a test has not ended, for the next one."""
    workers: dict[str, Worker] = {}
    yield workers
    for each in workers.values():
        each.kill()


@pytest.fixture(params=["busy", "idle"])
def worker(folder: Path, left: dict[str, Worker], request: pytest.FixtureRequest) -> Iterator[Worker]:
    process = left.pop(request.param, None) or Worker(folder, request.param)
    yield process
    if process.poll() is None:
        left[request.param] = process


def test_a_rank_imports_nothing_from_the_current_folder(folder: Path, tmp_path: Path) -> None:
    for name in ("common", "numpy", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    command = [sys.executable, rank_worker.__file__, str(folder), "idle"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.kill()
    assert said == "computed\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_ends_when_a_rank_is_lost(worker: Worker, number: signal.Signals) -> None:
    """Whether it computes or not; and nobody is left behind."""
    [rank] = children(worker.pid)
    os.kill(rank, number)
    for _ in worker.stdout:
        pass
    assert worker.wait(60) == EXIT_RANK_LOST
    wait_for_end(rank)


def processor_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("worker", ["idle"], indirect=True)
def test_a_group_without_work_is_idle(worker: Worker) -> None:
    [rank] = children(worker.pid)
    before = processor_s(rank) + processor_s(worker.pid)
    time.sleep(2)
    assert processor_s(rank) + processor_s(worker.pid) - before < 0.5, "somebody looks for work all the time"


@pytest.mark.parametrize("worker", ["busy"], indirect=True)
def test_a_group_that_was_stopped_as_a_whole_goes_on(worker: Worker) -> None:
    """Though nobody has counted for longer than a rank may take."""
    [rank] = children(worker.pid)
    for pause_s in (0.75, 2.5):
        for pid in (rank, worker.pid):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(pause_s)
        # By a process that does nothing else: if this one stood still instead, the rank would be stopped for too long.
        one_by_one = f"kill -CONT {worker.pid}; sleep 0.3; kill -CONT {rank}"
        subprocess.run(["sh", "-c", one_by_one], check=True)
        for _ in range(200):  # more than a pipe holds of those before
            assert worker.stdout.readline() == "computed\n"
        assert worker.poll() is None


@pytest.mark.processes
@pytest.mark.parametrize(("stopped", "lost_after_s"), [(True, 1.0), (False, 3.0)], ids=["frozen", "starved"])
def test_a_rank_that_gets_no_cpu_is_not_lost_as_soon_as_one_that_is_frozen(
    monkeypatch: pytest.MonkeyPatch, stopped: bool, lost_after_s: float
) -> None:
    clock, told = StandingClock(), list[tuple[float, str]]()
    begin_s = clock.now

    class Group(Ranks):
        def _lost(self, why: str) -> None:
            told.append((clock.now - begin_s, why))
            self._closing = True

    class Passing(ranks._Ends):
        def wait(self, timeout_s: float) -> None:
            clock.now += timeout_s

    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(ranks, "_Ends", Passing)  # not its method, which watches over other groups call
    group = object.__new__(Group)
    group._plan = GroupPlan(width=2, num_threads=1, pulse=Pulse())
    group._pulses = np.ones(2, np.int64)
    group._closing, group._ready = False, True
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"x")
            assert process.stdout.read(1) == b"x"  # it has started, and waits for more
            if stopped:
                process.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            group._processes = [process]
            group._watch()
        finally:
            process.kill()
    [(after_s, why)] = told
    assert after_s == pytest.approx(lost_after_s, abs=0.06)
    assert ("stands still" in why) is stopped


@pytest.mark.processes
def test_a_python_that_was_built_for_an_old_system_has_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("memfd_create", "pidfd_open"):
        monkeypatch.delattr(os, call)
    file = ranks._memory_file("test", 5)
    assert os.fstat(file).st_size == 5
    os.close(file)
    with subprocess.Popen(["true"]) as process:
        ranks._Ends([process]).wait(0)


def test_ranks_end_with_their_worker(worker: Worker) -> None:
    [rank] = children(worker.pid)
    worker.kill()
    wait_for_end(rank)
    assert worker.wait(60) == -signal.SIGKILL


def wait_for_end(rank: int) -> None:
    deadline = time.monotonic() + 30
    while not ended(rank):
        assert time.monotonic() < deadline, "the rank is left behind"
        time.sleep(0.02)


@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_a_watch_that_fails_ends_the_worker(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody would notice when a rank ends, and rank 0 would wait for it for ever."""
    told: list[str] = []

    def fails(self: Ranks) -> None:
        raise kind("a bug")

    monkeypatch.setattr(Ranks, "_watch", fails)
    monkeypatch.setattr(Ranks, "_lost", lambda self, why: told.append(why))
    with pytest.raises(kind, match="a bug"):
        object.__new__(Ranks)._run([])
    assert told == [f"the watch over the ranks has failed: {kind.__name__}('a bug')"]
