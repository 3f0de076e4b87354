"""The parts of the measurements on a GPU: what they need, what they plan, what of them can be tested without one."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.command import call
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import inventory, kernels, parts, products, runner, timing, tune
from benchmarks.gpu.compiled import Binary, Case
from benchmarks.gpu.engine import SHAPES
from benchmarks.gpu.runner import Measurement
from benchmarks.record import ROOT
from common.engine.kernels import sampler
from common.engine.kernels.decode_attention import DecodeTiling
from common.engine.kernels.prefill_attention import PrefillTiling
from common.engine.kernels.skinny import SkinnyTiling
from common.engine.kernels.tuning import Tuning

WIRE = ("zmq", "aiohttp", "nixl", "nixl_cu12", "nixl_cu13", "msgpack", "uvloop", "prometheus_client", "llguidance")
HUB = ("transformers", "tokenizers", "safetensors", "huggingface_hub")
COMPUTE = ("torch", "triton", "numpy", "pydantic")
BLOCKED = {
    **dict.fromkeys(("__main__", "runner", "child", "parts", "records", "inventory"), (*WIRE, *HUB, *COMPUTE)),
    **dict.fromkeys(("timing", "kernels", "products", "tune", "checks", "compiled"), (*WIRE, *HUB)),
    "engine": ("zmq", "aiohttp", "nixl", "nixl_cu12", "nixl_cu13", "msgpack", "uvloop"),
    "transfer": ("zmq", "aiohttp", "triton", *HUB),
}
"""What each module does without when it is imported. Torch itself may look for triton and numpy."""
IMPORT = """
import importlib, json, os, sys, tempfile, traceback

class Blocked:
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ImportError(f"{name} is blocked")

def error_of(module, blocked):
    with tempfile.TemporaryFile("w+") as said:
        if (child := os.fork()) == 0:
            try:
                assert not set(blocked) & set(sys.modules)
                sys.meta_path.insert(0, Blocked(blocked))
                importlib.import_module(f"benchmarks.gpu.{module}")
            except BaseException:
                traceback.print_exc(file=said)
            said.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return said.read() or (f"it ended with status {status}" if status else "")

modules, errors = json.loads(sys.argv[1]), {}
for library in ("torch", "triton", ""):
    for each in [each for each, blocked in modules.items() if not library or library in blocked]:
        errors[each] = error_of(each, modules.pop(each))
    if library:
        importlib.import_module(library)  # once for all that may have it
print(json.dumps(errors))
"""
"""Prints what each of the modules raises when it is imported."""


@pytest.fixture(scope="module")
def import_errors() -> dict[str, str]:
    command = [sys.executable, "-c", IMPORT, json.dumps(BLOCKED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    errors: dict[str, str] = json.loads(done.stdout)
    return errors


@pytest.mark.processes
@pytest.mark.parametrize("module", BLOCKED)
def test_a_part_is_imported_without_what_it_does_not_need(module: str, import_errors: dict[str, str]) -> None:
    assert import_errors[module] == ""


def everything() -> list[Measurement]:
    plan = command.planned([*parts.PARTS, "compile"], Path("/out"), Path("/scratch"), 90)
    return [parts.device(), *(each for part in plan.values() for each in part)]


def test_every_measurement_names_a_function_and_its_arguments() -> None:
    names = [each.name for each in everything()]
    assert len(names) == len(set(names))
    for each in everything():
        module, _, name = each.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        known = function.__code__.co_varnames[: function.__code__.co_argcount]
        assert sorted(known) == sorted(each.arguments), each.name
        json.dumps(dict(each.arguments))
        assert not each.instead_of or each.instead_of in names


def test_the_models_are_those_of_the_engine() -> None:
    assert set(parts.MODELS) == set(SHAPES)


def test_the_products_are_those_of_the_models() -> None:
    assert set(products.MODELS) == set(SHAPES)
    for name, of_model in products.MODELS.items():
        shape = SHAPES[name]
        hidden, inner = shape.hidden_size, shape.intermediate_size
        head_dim = getattr(shape, "head_dim", None) or hidden // shape.num_attention_heads
        heads = shape.num_attention_heads * head_dim
        assert [(each.kind, each.outputs, each.inputs) for each in of_model] == [
            ("plain", heads + 2 * shape.num_key_value_heads * head_dim, hidden),
            ("onto", hidden, heads),
            ("gate", 2 * inner, hidden),
            ("onto", hidden, inner),
            ("plain", shape.vocab_size, hidden),
        ]


def test_ucx_is_told_where_its_modules_are() -> None:
    told = parts.ucx()
    assert told["UCX_TLS"] == "cuda_copy,cuda_ipc,sm,tcp,self"
    if "UCX_MODULE_DIR" in told:
        assert list(Path(told["UCX_MODULE_DIR"]).glob("libuct_cuda*"))


def asked(arguments: list[str]) -> dict[str, Any]:
    """The options of a command line."""
    options: dict[str, Any] = call(lambda **options: options, None, arguments, options_of=command.main)
    return options


def test_the_command_line_names_parts_and_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = asked(["check", "kernels", "--out", str(tmp_path), "--limit", "480"])
    assert (options["parts"], options["out"], options["limit"]) == (("check", "kernels"), tmp_path, 480.0)
    names = [each.name for each in command.chosen(everything(), ["kernels prefill"])]
    assert names == ["device", "kernels prefill"]
    left = command.chosen(everything(), [], ["kernels prefill"])
    assert [each for each in everything() if each not in left] == command.chosen(everything(), ["kernels prefill"])[1:]
    for only, without in ((["x"], []), ([], ["x"])):
        with pytest.raises(SystemExit, match="no measurement x"):
            command.chosen(everything(), only, without)
    with pytest.raises(SystemExit):
        call(command.main, None, ["nothing"])
    with pytest.raises(SystemExit):
        call(command.main, None, ["record", "check"])
    capsys.readouterr()


# --- the page --------------------------------------------------------------------------------------------------------

VISIT_S = 900.0
"""Seconds of a visit, from the asking for a machine until it is given back."""
START_S = 60.0
"""Most seconds of a machine's start with its transfers."""
LEAST_S = 240.0
"""Seconds that must be left for a machine to be started."""
IDLE_S = 30.0
"""Seconds after a command in which the machine is still there."""
BETWEEN_S = 20.0
"""Most seconds in which results come back, and the tree and the table go there, between two commands."""
BESIDE_S = 6.0 + runner._DUMP_S + runner._KILL_S
"""Most seconds of a command beyond its limit: for unpacking the archive, and for the end of what is out of time."""


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "gpu.md").read_text()


@pytest.fixture(scope="module")
def visits(page: str) -> list[list[dict[str, Any]]]:
    """The options of each command of each visit."""
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    commands = [re.findall(r"^python3 -m benchmarks\.gpu (.*)$", block, re.MULTILINE) for block in blocks]
    return [[asked(shlex.split(words)) for words in visit] for visit in commands if visit]


def test_the_visits_of_the_page_are_two_commands_that_fit_in_a_quarter_of_an_hour(
    visits: list[list[dict[str, Any]]],
) -> None:
    assert [len(visit) for visit in visits] == [2, 2]
    for first, second in visits:
        assert max(first["limit"], second["limit"]) <= 580, "a command may have ten minutes"
        left_s = VISIT_S - START_S - first["limit"] - BESIDE_S - IDLE_S - BETWEEN_S
        assert left_s >= LEAST_S, "the machine may have gone back, and no other one is started"
        assert START_S + second["limit"] + BESIDE_S <= left_s, "the second command may need a machine of its own"
    tuned = visits[0][0]["parts"]
    assert tuned[0] == "tune", "what comes before it, or in another command, may not have the table"
    assert {part for visit in visits for each in visit for part in each["parts"]} == set(parts.PARTS)


def told_seconds(page: str) -> dict[str, list[int]]:
    """Part → the seconds that the page tells of each of its measurements."""
    rows = re.findall(r"^\| `(\w+)` \| (\d+(?: \+ \d+)*) \|", page, re.MULTILINE)
    return {part: [int(each) for each in seconds.split(" + ")] for part, seconds in rows}


def test_each_command_of_the_page_has_time_for_what_it_lists(page: str, visits: list[list[dict[str, Any]]]) -> None:
    """What is measured instead of something that has failed is not counted: what is optional comes last."""
    told = told_seconds(page)
    measurements = {name: of(Path("/out"), Path("/scratch")) for name, of in parts.PARTS.items()}
    measurements["device"] = [parts.device()]
    assert {part: len(seconds) for part, seconds in told.items()} == {
        part: len(found) for part, found in measurements.items()
    }
    taken_s: dict[str, dict[str, int]] = {}
    for part, found in measurements.items():
        pairs = list(zip(found, told[part], strict=True))
        assert [each.name for each, seconds in pairs if seconds > each.timeout_s] == []
        taken_s[part] = {each.name: seconds for each, seconds in pairs if not each.instead_of}
    done: set[str] = set()
    for options in (each for visit in visits for each in visit):
        asked_s = {name: s for part in ("device", *options["parts"]) for name, s in taken_s[part].items()}
        for name in options["without"]:
            del asked_s[name]
        assert sum(asked_s.values()) <= options["limit"], options
        done |= asked_s.keys()
    assert done == {name for of_part in taken_s.values() for name in of_part}, "each in one of the commands"


# --- times -----------------------------------------------------------------------------------------------------------


class Gpu:
    """Stands in for a GPU and its clock: a graph takes 10 µs for each call, its launch 12 µs of the host's time."""

    CALL_US, LAUNCH_US = 10.0, 12.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host_us = self.free_us = 0.0
        gpu = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_us = max(gpu.host_us, gpu.free_us)

            def synchronize(self) -> None:
                gpu.host_us = max(gpu.host_us, self.at_us)

            def elapsed_time(self, end: Any) -> float:
                return float(end.at_us - self.at_us) / 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(timing, "captured", self.captured)

    def captured(self, calls: list[Any]) -> Any:
        return SimpleNamespace(replay=lambda: self.replay(len(calls)))

    def replay(self, num_calls: int) -> None:
        self.host_us += self.LAUNCH_US
        self.free_us = max(self.host_us, self.free_us) + num_calls * self.CALL_US


@pytest.mark.parametrize("num_calls", [1, 2, 20, 64])
def test_what_is_timed_is_not_the_launch(monkeypatch: pytest.MonkeyPatch, num_calls: int) -> None:
    Gpu(monkeypatch)
    assert timing.graph_us([lambda: None] * num_calls) == pytest.approx(Gpu.CALL_US)


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told = dict(kwargs or {})
        if told.get("device") == "cuda":
            told["device"] = "cpu"
        return func(*args, **told)


def test_what_is_timed_of_the_sampler_makes_no_tensors_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be a kernel of torch in the graph, whose time is told as the sampler's."""
    drawn: list[tuple[Any, ...]] = []

    def twice(calls: list[Any]) -> float:
        for each in [*calls, *calls]:
            each()
        return 1.0

    monkeypatch.setattr(kernels, "graph_us", twice)
    monkeypatch.setattr(sampler, "best", lambda logits: logits.max(dim=1))
    monkeypatch.setattr(sampler, "draw", lambda *tensors, hiding: drawn.append(tensors))
    with OnCpu():
        kernels.sampling(2, vocabulary=64)
    assert len(drawn) == 4
    for first, second in (drawn[:2], drawn[2:]):
        assert [one is other for one, other in zip(first, second, strict=True)] == [True] * 7
    _, _, _, top_k, top_p, _, _ = drawn[-1]
    assert (top_k.tolist(), top_p.tolist()) == ([50, 50], pytest.approx([0.9, 0.9]))


# --- tuning ----------------------------------------------------------------------------------------------------------


def test_candidates_that_spill_are_left_out() -> None:
    tried = {(each.rows, each.tile, each.num_warps) for each in tune.prefill_candidates(80)}
    assert {(256, 32, 8), (128, 64, 8), (128, 32, 4), (64, 128, 4)} <= tried
    assert not {each for each in tried if each[0] == 256 and each[1] > 32}
    assert not {each for each in tried if each[0] == 128 and each[1] >= 64 and each[2] == 4}
    assert not any(each.copy_engine for each in tune.prefill_candidates(80))


def test_a_hopper_gpu_has_candidates_with_the_copy_engine() -> None:
    """Among them the one that spills and is fastest."""
    tried = {(each.rows, each.tile, each.num_warps) for each in tune.prefill_candidates(90) if each.copy_engine}
    assert {(128, 64, 4), (128, 64, 8), (128, 32, 4), (64, 64, 4)} <= tried


def entry(num_rows: int, tile: int) -> dict[str, Any]:
    return tune.entry_of("decode", tune._HEADS[64], {"num_rows": num_rows}, DecodeTiling(tile=tile))


def test_the_table_is_written_after_each_shape_and_keeps_the_others(tmp_path: Path) -> None:
    table, out = tmp_path / "tuning.json", tmp_path / "out"
    out.mkdir()
    table.write_text(json.dumps({"other": [1]}))
    for new in (entry(8, 32), entry(16, 32), entry(8, 64)):
        tune.write(new, "gpu", table, out)
        assert json.loads(table.read_text())["gpu"][-1] == new
    assert json.loads(table.read_text()) == {"other": [1], "gpu": [entry(16, 32), entry(8, 64)]}
    assert (out / "tuning.json").read_text() == table.read_text()


def test_no_copy_of_the_table_goes_among_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, results = tmp_path / "tuning.json", tmp_path / "results"
    results.mkdir()
    table.write_text("{}")
    monkeypatch.setattr(tune, "RESULTS", results)
    tune.write(entry(8, 32), "gpu", table, results)
    assert json.loads(table.read_text()) == {"gpu": [entry(8, 32)]}
    assert list(results.iterdir()) == []


def test_a_tiling_that_cannot_be_compiled_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    def binary(programs: int = 1, stack_bytes: int = 0) -> list[Binary]:
        return [
            Binary(
                kernel="decode", programs=programs, stack_bytes=stack_bytes, registers=1, shared_bytes=0, num_warps=4,
                products="",
            )
        ]  # fmt: skip

    tilings = [DecodeTiling(tile=tile) for tile in (16, 32, 64, 128)]
    made = [RuntimeError("PassManager::run failed"), binary(programs=0), binary(), binary(stack_bytes=10_000)]
    monkeypatch.setattr(tune, "compiled", lambda cases: iter(made))
    cases = [Case(capability=90, kernel="decode", tiling=tiling) for tiling in tilings]
    assert tune.fitting({"first": cases[:2], "second": cases[2:]}) == {"first": [], "second": [tilings[2]]}


def test_a_tiling_that_does_not_run_is_no_candidate() -> None:
    def us(tiling: PrefillTiling) -> float:
        if tiling.rows == 256:
            raise RuntimeError("out of resource: shared memory")
        return float(tiling.rows)

    tilings = [PrefillTiling(rows=rows) for rows in (256, 128, 64)]
    assert [taken for taken, _ in tune.timed(tilings, us)] == [64.0, 128.0]


def test_prefill_tilings_have_as_many_programs_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {"registers": 1, "stack_bytes": 0, "shared_bytes": 0, "num_warps": 4, "products": ""}
    made = [Binary(kernel=kernel, programs=programs, **told) for kernel, programs in (("prefill", 2), ("combine", 8))]
    monkeypatch.setattr(tune, "compiled", lambda cases: iter([made]))
    case = Case(capability=90, kernel="prefill", tiling=PrefillTiling(num_warps=4))
    assert tune.fitting({"key": [case]}) == {"key": [PrefillTiling(num_warps=4, programs=2)]}


@pytest.mark.parametrize("one_is_faster", [False, True])
def test_keys_are_cut_for_all_programs_unless_a_short_chunk_is_faster_with_one(
    one_is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def us(calls: list[Any]) -> float:
        [(chunk, tiling)] = calls
        if chunk == kernels.PREFILL_CHUNK:
            return float(tiling.rows)
        return float(tiling.programs if one_is_faster else 9 - tiling.programs)

    monkeypatch.setattr(kernels, "Scene", lambda batch, length, query_len, copies, **options: query_len)
    monkeypatch.setattr(kernels, "prefill_call", lambda scene, tiling: (scene, tiling))
    monkeypatch.setattr(tune, "graph_us", us)
    tilings = [PrefillTiling(rows=rows, programs=programs) for rows, programs in ((128, 1), (64, 3))]
    entry, _ = tune.best_prefill(kernels.LLAMA_8B, tilings)
    assert entry["tiling"] == asdict(PrefillTiling(rows=64, programs=1 if one_is_faster else 3))


def test_a_product_has_the_fastest_tiling_for_each_number_of_rows_or_torch() -> None:
    """Many columns are quick with few rows, and few columns with many; one tiling does not run."""
    product = products.Product(kind="gate", outputs=64, inputs=128)
    tilings = [SkinnyTiling(columns=columns) for columns in (16, 32, 64, 128)]

    def us(rows: int, tiling: SkinnyTiling) -> float:
        if tiling.columns == 64:
            raise AssertionError("off by 1.0")
        return 10 + abs(rows * tiling.columns - 128)

    torch_us = {1: 11.0, 4: 12.0, 8: 9.0, 16: 1e6}
    entries = [entry for entry, _ in tune.best_product(product, tilings, us, torch_us)]
    assert [each["shape"]["rows"] for each in entries] == [1, 4, 8, 16]
    assert [each["tiling"] and each["tiling"]["columns"] for each in entries] == [128, 32, None, 16]
    tuning = Tuning("GPU", 0, {"GPU": json.loads(json.dumps(entries))})
    shape = {"outputs": 64, "inputs": 128, "itemsize": 2}
    assert tuning.skinny("gate", rows=3, **shape) == SkinnyTiling(columns=32)
    assert tuning.skinny("gate", rows=7, **shape) is None


def test_few_outputs_are_split_until_there_is_work_for_all() -> None:
    few, many = (products.Product(kind="onto", outputs=outputs, inputs=4096) for outputs in (1024, 128256))
    assert {each.splits for each in tune.product_candidates(few, 132) if each.columns == 64} == {8, 16}
    assert {each.splits for each in tune.product_candidates(many, 132)} == {1}


# --- what the machine has --------------------------------------------------------------------------------------------

QUERY = """
GPU 00000000:00:05.0
    FB Memory Usage
        Total                                          : 81559 MiB
        Reserved                                       : 614 MiB
    BAR1 Memory Usage
        Total                                          : 131072 MiB
        Used                                           : 1 MiB
    Conf Compute Protected Memory Usage
        Total                                          : 0 MiB
"""


def test_sizes_of_memories_are_read() -> None:
    assert inventory.memory_mib(QUERY) == {"FB": 81559, "BAR1": 131072, "Conf Compute Protected": 0}
    assert inventory.memory_mib("nvidia-smi: not found") == {}


@pytest.mark.processes
def test_an_inventory_needs_nothing_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(inventory, "PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr(inventory, "tool", lambda name: "")
    rows = {row["kind"]: row for row in inventory.inventory()}
    assert rows["packages"]["versions"]["no-such-package"] == ""
    assert rows["packages"]["versions"]["torch"]
    assert rows["memory"]["mib"] == {}
    assert "nvidia-smi" in rows["nvidia-smi topo -m"]["output"]
    (row,) = inventory.sanitizer()
    assert row["text"] == "there is no compute-sanitizer"


SANITIZER = """#!/bin/sh
# Stands in for compute-sanitizer: writes a report and a row, and ends as it is told.
while [ "$1" != --log-file ]; do shift; done
echo "========= ERROR SUMMARY: $ERRORS errors" > "$2"
echo '{"kind": "decode"}'
exit $CODE
"""


@pytest.mark.processes
@pytest.mark.parametrize("errors", [0, 3])
def test_what_the_sanitizer_finds_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: int) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(SANITIZER)
    program.chmod(0o755)
    monkeypatch.setattr(inventory, "tool", lambda name: str(program))
    monkeypatch.setenv("ERRORS", str(errors))
    monkeypatch.setenv("CODE", "9" if errors else "0")
    rows = inventory.sanitizer()
    row = next(rows)
    assert row["text"] == f"memcheck: ERROR SUMMARY: {errors} errors"
    assert row["rows"] == [{"kind": "decode"}]
    if errors:
        with pytest.raises(AssertionError):
            next(rows)
    else:
        assert list(rows) == []


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_models_that_were_not_compared_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all("pytest.mark.gpu" in (ROOT / each).read_text() for each in inventory.GPU_TESTS)
    monkeypatch.setattr(inventory, "GPU_TESTS", inventory.GPU_TESTS[:1])  # one shows it
    rows = inventory.models()
    assert next(rows)["outcome"] == "skipped"
    with pytest.raises(AssertionError, match="needs a GPU"):
        next(rows)


@pytest.mark.processes
def test_the_tests_of_sizes_are_run_and_a_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler_tests = inventory.SIZE_TESTS[0]
    monkeypatch.setattr(inventory, "SIZE_TESTS", (f"{sampler_tests}::test_of_nothing_the_best_is_minus_infinity",))
    [row] = inventory.sizes()
    assert (row["kind"], row["outcome"]) == ("size", "passed")
    monkeypatch.setattr(inventory, "SIZE_TESTS", (f"{sampler_tests}::test_that_is_not_there",))
    with pytest.raises(AssertionError, match="pytest ended with 4"):
        list(inventory.sizes())
