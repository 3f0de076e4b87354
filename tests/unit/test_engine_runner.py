from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint

from benchmarks.gpu import products
from common.contract.errors import OperatorError
from common.contract.kv_layout import Fingerprint
from common.contract.sampling import SamplingParams
from common.engine import native
from common.engine.backends import backend_on
from common.engine.batch import NOTHING_DRAFTED, Sample, Sampled, SampledToken, Slice
from common.engine.engine import Engine, Started, device_of
from common.engine.engine_thread import EngineThread
from common.engine.executor import Executor
from common.engine.host_swap import Copy, HostSwap, Lane
from common.engine.kernels.backend import TritonBackend
from common.engine.native.backend import NativeBackend
from common.engine.rope import Angles, Rope
from common.engine.runner import CPU_CACHE_BYTES, ModelRunner, load_runner
from common.engine.token_counts import token_counts
from common.runtime.checkpoint import weights_hash
from common.runtime.config import DecodeSettings, WorkerSettings
from common.scheduling.costs import Costs

torch.set_num_threads(1)

PROMPT = [5, 80, 17, 200, 43, 9, 300, 21, 77, 6]
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), dtype="bfloat16")


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    return load_runner(folder, kv_cache_bytes=2**16, block_size=BLOCK_SIZE, dtype="float32", swap_bytes=2**14)


class LateLane(Lane):
    """Makes each copy at the last moment that is left to it: as slow as a stream beside the others can be."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.copies: list[Copy] = []

    def copy(self, copies: Sequence[Copy]) -> None:
        self.copies += copies

    def join(self) -> None:
        self.log.append("swapped")
        for to, source in self.copies:
            to.copy_(source)
        self.copies.clear()


class Late(ModelRunner):
    """A runner whose swaps are late; `log` has them, and what is computed, in their order."""

    def __init__(self, runner: ModelRunner) -> None:
        log: list[str] = []

        class Logged(NativeBackend):
            def __init__(self, kernels: native.Kernels) -> None:
                super().__init__(kernels)

                def best(x_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                    log.append("sampled")
                    return kernels.best(x_TV)

                self.best = best

            def angles(self, rope: Rope, positions_T: torch.Tensor, dtype: torch.dtype) -> Angles:
                log.append("computed")
                return super().angles(rope, positions_T, dtype)

        kernels = native.kernels()
        assert kernels is not None
        self.lane, self.log = LateLane(log), log
        swap = HostSwap(runner.layout, runner.num_host_blocks, runner.cache.device, self.lane)
        super().__init__(Executor(runner.executor.decoder, runner.cache, swap, Logged(kernels)))


@pytest.fixture(params=["at once", "late"])
def swapping(runner: ModelRunner, request: pytest.FixtureRequest) -> ModelRunner:
    """Swaps made at once, as a CPU does, and as late as a stream of their own may make them."""
    return runner if request.param == "at once" else Late(runner)


@pytest.fixture
def engine(runner: ModelRunner) -> Iterator[Engine]:
    fingerprint = Fingerprint(config_hash="config", weights_hash="weights", layout=runner.layout)
    engine = Engine(EngineThread("engine"), runner, fingerprint)
    yield engine
    engine.close()


async def test_an_engine_whose_device_hangs_is_closed_without_it(
    engine: Engine, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker's process can end; what the step still uses stays as it is."""
    device, closed = threading.Event(), list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(runner, "close", lambda: closed.append("runner"))
        patched.setattr(engine._thread, "close", partial(engine._thread.close, 0.05))
        engine.call(device.wait)
        engine.close()
    device.set()
    assert closed == []
    assert "a step does not end" in caplog.text


def ask(token_ids: list[int], choice: int, sampling: SamplingParams) -> Sample:
    return Sample(params=sampling, choice=choice, position=len(token_ids), token_ids=token_ids, prompt_len=len(PROMPT))


def token_of(outcome: Sampled) -> int:
    assert isinstance(outcome, SampledToken)
    return outcome.token_id


def test_outcomes_come_slice_by_slice(runner: ModelRunner) -> None:
    sampling = SamplingParams(max_tokens=4, seed=1)
    table = [3, 1, 2]
    middle = Slice(token_ids=PROMPT[:4], start=0, block_table=[8])
    several = Slice(
        token_ids=PROMPT, start=0, block_table=table, samples=tuple(ask(PROMPT, i, sampling) for i in range(6))
    )
    one = Slice(token_ids=PROMPT, start=0, block_table=[5, 6, 7], samples=(ask(PROMPT, 4, sampling),))
    nothing, six, single = runner.step([middle, several, one])
    assert nothing == ()
    assert len(six) == 6
    assert single == (six[4],)
    assert len({token_of(each) for each in six}) > 1, "choices differ"


def test_a_fork_goes_on_from_copied_blocks(runner: ModelRunner) -> None:
    """Two choices share the full blocks and each has its own last one; they do not disturb each other."""
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    runner.step([Slice(token_ids=PROMPT, start=0, block_table=[3, 1, 2])])
    runner.copy_block(2, 9)

    def step(forks: dict[int, list[int]]) -> list[int]:
        slices = [
            Slice(
                token_ids=tokens[-1:],
                start=len(tokens) - 1,
                block_table=[3, 1, last],
                samples=(ask(tokens, 0, sampling),),
            )
            for last, tokens in forks.items()
        ]
        return [token_of(outcome) for (outcome,) in runner.step(slices)]

    together = step({2: [*PROMPT, 50], 9: [*PROMPT, 60]})
    fresh = [
        token_of(runner.step([Slice(token_ids=tokens, start=0, block_table=[4, 5, 6], samples=(asked,))])[0][0])
        for tokens in ([*PROMPT, 50], [*PROMPT, 60])
        for asked in (ask(tokens, 0, sampling),)
    ]
    assert together == fresh


def test_knows_its_model_and_its_cache(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    runner = load_runner(
        folder, kv_cache_bytes=10_000, block_size=16, progress=lambda done, total: seen.append((done, total))
    )
    assert runner.layout == runner.config.layout(16, "bfloat16")
    assert runner.cache.num_blocks == 10_000 // runner.layout.block_bytes == 2
    assert runner.cache.num_slots == 32
    assert len(runner.executor.decoder._rope.table(torch.float32)) == 32, "no sequence has more positions"
    assert seen[-1] == (21, 21)


def test_batch_invariance_on_a_cpu_without_kernels_is_refused(folder: Path) -> None:
    with pytest.raises(OperatorError, match="--batch-invariant needs"):
        load_runner(folder, kv_cache_bytes=2**16, block_size=BLOCK_SIZE, cpu_kernels=False, batch_invariant=True)


def test_a_cache_of_no_block_is_refused(folder: Path) -> None:
    with pytest.raises(
        OperatorError, match="a KV cache of 100 bytes does not hold one block: 4096 bytes for 16 tokens"
    ):
        load_runner(folder, kv_cache_bytes=100, block_size=16)


@pytest.mark.parametrize(("num_bytes", "swap_bytes"), [(10_000, 2**60), (2**60, 0), (2**70, 0)])
def test_memory_that_the_machine_does_not_have_is_refused(folder: Path, num_bytes: int, swap_bytes: int) -> None:
    said = f"no memory for a KV cache of {num_bytes} bytes and a swap space of {swap_bytes}: "
    with pytest.raises(OperatorError, match=said):
        load_runner(folder, kv_cache_bytes=num_bytes, block_size=16, swap_bytes=swap_bytes)


def test_knows_its_swap_space(folder: Path, runner: ModelRunner) -> None:
    assert runner.num_host_blocks == 2**14 // runner.layout.block_bytes == 8
    assert load_runner(folder, kv_cache_bytes=2**16, block_size=16, swap_bytes=4095).num_host_blocks == 0


def test_without_swap_space_swaps_are_refused(folder: Path) -> None:
    runner = load_runner(folder, kv_cache_bytes=2**16, block_size=BLOCK_SIZE)
    assert runner.num_host_blocks == 0
    with pytest.raises(AssertionError, match="no room at 0"):
        runner.swap_out([(0, 0)])
    with pytest.raises(AssertionError, match="nothing is at 0"):
        runner.swap_in([(0, 0)])


def test_a_step_of_nothing_gives_nothing(runner: ModelRunner) -> None:
    assert runner.step([]) == []
    assert not runner.cache.blocks.any()


GREEDY = SamplingParams(max_tokens=20, temperature=0.0, logprobs=5)


def decode(runner: ModelRunner, tokens: list[int], table: list[int], num: int) -> list[SampledToken]:
    """Append `num` tokens to `tokens`, whose KV but the last token's is in `table`."""
    outcomes: list[SampledToken] = []
    for _ in range(num):
        last = Slice(token_ids=tokens[-1:], start=len(tokens) - 1, block_table=table, samples=(ask(tokens, 0, GREEDY),))
        outcome = runner.step([last])[0][0]
        assert isinstance(outcome, SampledToken)
        tokens.append(outcome.token_id)
        outcomes.append(outcome)
    return outcomes


PENALTIES: dict[str, Any] = {"repetition_penalty": 1.6, "presence_penalty": 0.4, "frequency_penalty": 0.7}


@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["without penalties", "with penalties"])
def test_a_step_may_follow_one_whose_tokens_nobody_knows_yet(runner: ModelRunner, penalties: dict[str, Any]) -> None:
    """Two sequences, one of which leaves, and a third one that comes: in other places each time."""
    greedy = SamplingParams(max_tokens=9, **penalties)
    drawn = SamplingParams(max_tokens=9, temperature=1.5, seed=4, **penalties)
    prompts = {name: PROMPT[:size] for name, size in (("a", 5), ("b", 9), ("c", 3))}
    tables = {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7], "c": [8, 9, 10, 11]}
    plan = ["ab", "ba", "bac", "cb", "bc"]

    def slices(step: int, tokens: dict[str, list[int]], *, known: bool) -> list[Slice]:
        made = []
        for name in plan[step]:
            ran_before = step > 0 and name in plan[step - 1]
            num_tokens = len(tokens[name]) + (ran_before and not known)
            params = drawn if name == "b" else greedy
            follows = plan[step - 1].index(name) if ran_before and not known else None
            first = name not in "".join(plan[:step])
            made.append(
                Slice(
                    token_ids=tokens[name] if first else [0] if follows is not None else tokens[name][-1:],
                    start=0 if first else num_tokens - 1,
                    block_table=tables[name],
                    samples=(
                        Sample(
                            params=params,
                            choice=0,
                            position=num_tokens,
                            token_ids=tokens[name],
                            prompt_len=len(prompts[name]),
                            counts=counts[name],
                        ),
                    ),
                    follows=follows,
                )
            )
        return made

    texts = []
    for ahead in (False, True):
        runner.cache.blocks.zero_()
        tokens = {name: list(prompt) for name, prompt in prompts.items()}
        counts = {name: token_counts(greedy, tokens[name], len(prompt)) for name, prompt in prompts.items()}
        waiting: list[tuple[str, Any]] = []
        for step in range(len(plan)):
            waiting.append((plan[step], runner.submit(slices(step, tokens, known=not ahead))))
            if not ahead or step > 0:
                hear(waiting.pop(0), tokens)
        for each in waiting:
            hear(each, tokens)
        texts.append(tokens)
    assert texts[0] == texts[1]
    assert [len(texts[0][name]) - len(prompts[name]) for name in "abc"] == [3, 5, 3]


def hear(submitted: tuple[str, Any], tokens: dict[str, list[int]]) -> None:
    """The outcomes of a step."""
    for name, (outcome,) in zip(submitted[0], submitted[1].outcomes(), strict=True):
        assert isinstance(outcome, SampledToken)
        tokens[name].append(outcome.token_id)


def test_a_sequence_that_was_swapped_goes_on_as_if_it_never_was(swapping: ModelRunner) -> None:
    """Preempted in the middle of a block, and again later; meanwhile others use its blocks and its slots."""
    runner = swapping
    runner.step([Slice(token_ids=PROMPT[:-1], start=0, block_table=[0, 1, 2])])
    undisturbed = decode(runner, list(PROMPT), [0, 1, 2, 3, 4], 9)
    runner.cache.blocks.fill_(math.nan)

    def others_use(blocks: list[int]) -> None:
        runner.step([Slice(token_ids=range(100, 100 + BLOCK_SIZE * len(blocks)), start=0, block_table=blocks)])

    tokens = list(PROMPT)
    runner.step([Slice(token_ids=PROMPT[:-1], start=0, block_table=[9, 4, 11])])
    outcomes = decode(runner, tokens, [9, 4, 11], 2)
    runner.swap_out([(9, 5), (4, 0), (11, 3)])
    others_use([4, 9, 10, 11])
    runner.swap_out([(10, 1), (4, 2)])
    runner.swap_in([(3, 4), (5, 11), (0, 6)])
    others_use([9, 10])
    outcomes += decode(runner, tokens, [11, 6, 4, 0], 4)
    runner.swap_out([(11, 2), (6, 3), (4, 7), (0, 0)])
    others_use([0, 4, 6, 11])
    runner.swap_in([(2, 0), (3, 11), (7, 15), (0, 14)])
    outcomes += decode(runner, tokens, [0, 11, 15, 14, 3], 3)
    assert outcomes == undisturbed


def test_swaps_are_made_beside_a_step_that_does_not_need_them(runner: ModelRunner) -> None:
    late = Late(runner)
    runner.cache.blocks[2] = 1.0
    prompt = Slice(token_ids=PROMPT, start=0, block_table=[3, 1, 4], samples=(ask(PROMPT, 0, GREEDY),))
    late.swap_out([(2, 0)])
    late.swap_in([(0, 7)])
    late.step([prompt])
    assert late.log == ["computed", "swapped", "sampled"], "it is over when the outcomes are known"
    assert bool((runner.cache.blocks[7] == 1.0).all())
    late.log.clear()
    late.swap_out([(4, 0)])
    late.step([prompt])
    late.swap_in([(0, 5)])
    late.step([])
    late.step([prompt])
    late.swap_in([(0, 6)])
    late.copy_block(6, 8)
    assert late.log == ["swapped", "computed", "sampled", "swapped", "computed", "sampled", "swapped"]
    assert bool((runner.cache.blocks[8] == runner.cache.blocks[5]).all())


async def test_a_step_copies_then_swaps_out_then_in_then_computes(engine: Engine) -> None:
    """Block 2 is copied to 5, swapped from there to slot 1, and from there to 7, which the slice then attends to."""
    runner = engine.runner
    tokens, stale = [*PROMPT, 50], [7] * BLOCK_SIZE
    last = Slice(token_ids=[50], start=10, block_table=[3, 1, 7], samples=(ask(tokens, 0, GREEDY),))
    answers: list[object] = []

    def prepare() -> None:
        """Every place on the way holds something else, which is valid KV."""
        runner.step([Slice(token_ids=PROMPT, start=0, block_table=[3, 1, 2])])
        for block, token in ((5, 60), (7, 70), (8, 80)):
            runner.step([Slice(token_ids=[token, *stale[1:]], start=0, block_table=[block])])
        runner.swap_out([(8, 1)])

    for order in itertools.permutations(range(4)):
        prepare()
        parts = [
            lambda: runner.copy_block(2, 5),
            lambda: runner.swap_out([(5, 1)]),
            lambda: runner.swap_in([(1, 7)]),
            lambda: answers.append(runner.step([last])),
        ]
        for part in order:
            parts[part]()
    right, *wrong = answers
    assert right not in wrong, "another order cannot be told from the right one"
    prepare()
    result = await engine.finish(engine.submit([last], [(2, 5)], [(5, 1)], [(1, 7)]))
    assert result.outcomes == right


async def test_a_step_may_only_move_blocks(engine: Engine) -> None:
    cache = engine.runner.cache
    cache.blocks[2] = 1.0
    moves = engine.submit([], copies=[(2, 5)], swap_outs=[(5, 1)], swap_ins=[(1, 7)])
    assert (await engine.finish(moves)).outcomes == []
    assert bool((cache.blocks[[2, 5, 7]] == 1.0).all())
    assert (await engine.finish(engine.submit([]))).outcomes == []
    assert engine.num_steps == 2


async def test_a_step_is_timed_on_its_thread(engine: Engine) -> None:
    """The time that a step waits for the thread is not its own."""
    gate = threading.Event()
    blocking = engine.call(gate.wait)
    await asyncio.sleep(0)
    step = engine.submit([Slice(token_ids=PROMPT, start=0, block_table=[3, 1, 2])])
    waiting = asyncio.create_task(engine.finish(step))
    await asyncio.sleep(0.2)
    opened = time.perf_counter()
    gate.set()
    result = await waiting
    assert 0.0 < result.duration_s <= time.perf_counter() - opened
    assert engine.busy_s == result.duration_s
    await blocking


async def test_a_step_that_fails_does_not_count(engine: Engine) -> None:
    with pytest.raises(AssertionError, match="no room at 8"):
        await engine.finish(engine.submit([], swap_outs=[(0, 8)]))
    assert (engine.num_steps, engine.busy_s) == (0, 0.0)


async def test_a_step_ends_when_a_gpu_is_done_and_not_when_the_event_loop_hears_of_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next step, which was submitted meanwhile, would seem to take less than it does."""
    now = [1.0]
    monkeypatch.setattr("common.engine.engine.time", SimpleNamespace(perf_counter=lambda: now[0]))

    ends = iter((3.0, 5.0, 7.0))

    def outcomes() -> list[tuple[Sampled, ...]]:
        now[0] = next(ends)
        return []

    submitted: Any = SimpleNamespace(done=False, outcomes=outcomes, scores=list, chosen=lambda: None)

    def begun_at(begin: float) -> asyncio.Future[Started]:
        step: asyncio.Future[Started] = asyncio.get_running_loop().create_future()
        step.set_result(Started(begin, begin, submitted, NOTHING_DRAFTED))
        return step

    run = engine._waiter.run

    async def heard_late(work: Callable[[], Any]) -> Any:
        result = await run(work)
        now[0] = 10.0
        return result

    monkeypatch.setattr(engine._waiter, "run", heard_late)
    assert (await engine.finish(begun_at(1.0))).duration_s == 2.0
    second = await engine.finish(begun_at(2.0))
    assert (second.duration_s, second.between_s) == (2.0, 0.0), "it was submitted before the first one ended"
    third = await engine.finish(begun_at(5.5))
    assert (third.duration_s, third.between_s) == (1.5, 0.5)


def test_a_worker_takes_a_gpu_if_there_is_one_and_none_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert device_of(DecodeSettings()) == ("cuda" if there else "cpu")
        assert device_of(DecodeSettings(device="cpu")) == "cpu"


async def load(settings: WorkerSettings, folder: Path, swap_bytes: int) -> tuple[Costs, int, bool]:
    engine = await Engine.load(settings, folder, lambda done, total: None, step_tokens=64, swap_bytes=swap_bytes)
    try:
        return engine.costs, engine.runner.num_host_blocks, bool(engine.runner.cache.blocks.any())
    finally:
        engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("width", [1, 2])
async def test_a_gpu_that_is_not_there_is_an_error_that_names_the_cpu(
    width: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.engine.engine.load_runner", None)  # nothing is loaded
    with pytest.raises(OperatorError, match="--device cpu"):
        await load(DecodeSettings(model=str(folder), tensor_parallel=width).on("cuda"), folder, 0)


@pytest.mark.parametrize("full_at", ["measure_costs", "load_runner"])
async def test_a_gpu_without_room_is_an_error_that_says_what_to_lower(
    full_at: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or, if the weights do not fit, that the model is too large."""

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(f"common.engine.engine.{full_at}", full)
    advice = r"--kv-cache-bytes.*--max-num-seqs.*weights.*smaller model.*--tensor-parallel.*tried to allocate 3 GiB"
    with pytest.raises(OperatorError, match=advice):
        await load(DecodeSettings(model=str(folder)).on("cpu"), folder, 0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), OperatorError),
        (RuntimeError("9 bytes: [Errno 12] Cannot allocate memory"), OperatorError),
        (MemoryError("9 bytes"), OperatorError),
        (RuntimeError("--kv-cache-bytes is no matter: 9 bytes"), RuntimeError),
    ],
    ids=["torch", "the system", "Python", "another error"],
)
async def test_a_machine_without_room_is_an_error_that_says_what_to_lower(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("common.engine.engine.measure_costs", full)
    with pytest.raises(expected, match=r"--kv-cache-bytes.*9 bytes"):
        await load(DecodeSettings(model=str(folder)).on("cpu"), folder, 0)


def test_every_gpu_of_a_worker_has_a_backend_that_is_told_of_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[torch.device, bool]] = []
    monkeypatch.setattr(
        "common.engine.kernels.backend.TritonBackend",
        lambda device, batch_invariant: made.append((device, batch_invariant)),
    )
    devices = [torch.device("cuda", index) for index in range(2)]
    for device, invariant in zip(devices, (True, False), strict=True):
        backend_on(device, None, batch_invariant=invariant)
    assert made == [*zip(devices, (True, False), strict=True)]


def a_backend() -> None:
    TritonBackend(torch.device("cpu"))


def a_timed_product() -> None:
    products.Scene(products.Product(kind="plain", outputs=16, inputs=16), 1, torch.device("cpu"), copies=1)


@pytest.mark.parametrize("made", [a_backend, a_timed_product])
def test_on_a_gpu_products_are_summed_in_float32(made: Callable[[], None]) -> None:
    """Also in measurements."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before, precision = [getattr(matmul, name) for name in names], torch.get_float32_matmul_precision()
    try:
        for name in names:
            setattr(matmul, name, True)
        torch.set_float32_matmul_precision("high")
        made()
        assert [getattr(matmul, name) for name in names] == [False, False]
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)
        torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
async def test_a_checkpoint_that_is_replaced_between_loading_and_hashing_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file has the size and the time of the old one."""
    folder = make_checkpoint("llama", tmp_path / "model", dtype="bfloat16")
    replacement = make_checkpoint("llama", tmp_path / "other", seed=1, dtype="bfloat16") / name
    known = (folder / name).stat()
    os.utime(replacement, ns=(known.st_mtime_ns, known.st_mtime_ns))
    assert replacement.stat().st_size == known.st_size
    replaced = threading.Event()

    def replace_when_loaded(done: int, total: int) -> None:
        if done == total:
            replacement.replace(folder / name)
            replaced.set()

    def hash_late(folder: Path, num_threads: int) -> str:
        assert replaced.wait(60)
        return weights_hash(folder, num_threads)

    monkeypatch.setattr("common.engine.engine.weights_hash", hash_late)
    settings = DecodeSettings(model=str(folder), num_threads=1, kv_cache_bytes=2**18).on("cpu")
    with pytest.raises(OperatorError, match=f"{name} has changed while the model was loaded"):
        await Engine.load(settings, folder, replace_when_loaded, step_tokens=64)
    assert replaced.is_set()


async def test_a_cache_without_a_size_has_the_default_on_a_cpu(folder: Path) -> None:
    runner = load_runner(folder, kv_cache_bytes=None, block_size=16)
    assert runner.cache.num_blocks == CPU_CACHE_BYTES // runner.layout.block_bytes


async def test_loading_measures_the_costs(folder: Path) -> None:
    settings = DecodeSettings(
        model=str(folder), num_threads=1, kv_cache_bytes=2**18, block_size=16, dtype="float32"
    ).on("cpu")
    costs, num_host_blocks, dirty = await load(settings, folder, 2**17)
    assert num_host_blocks == 2**17 // 8192
    assert 0 < costs.prefill_s_per_token < 1
    assert 0 < costs.swap_s_per_block < 1
    assert not dirty
    costs, num_host_blocks, _ = await load(settings, folder, 0)
    assert (num_host_blocks, costs.swap_s_per_block) == (0, math.inf)
