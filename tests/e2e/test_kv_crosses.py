"""The KV really crosses: what a sink pulls is what the source has, and the answer depends on every block of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from stack import Workers, run_forked

from common.runtime.checkpoint import DEMO_FOLDER

TRANSPORTS = {"nixl": {}, "nixl-tcp": {"UCX_TLS": "^sm,ib"}, "zmq": {}}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pulled_blocks_are_the_sources_and_one_corrupted_block_changes_the_answer(
    transport: str, pools: dict[str, Workers]
) -> None:
    name = transport.partition("-")[0]
    env = TRANSPORTS[transport]
    workers = Workers.start(
        DEMO_FOLDER,
        decode=0,
        options=("--transport", name, "--checksums"),
        prefill_options=("--chunk-size", "32"),
        env=env,
    )
    pools[f"demo source {transport}"] = workers
    names = (DEMO_FOLDER / "names.txt").read_text().split()
    chosen = random.Random(4).sample(names, 10)
    codes = {each: f"{random.Random(each).randrange(10000):04d}" for each in chosen}
    facts = " ".join(f"The code of {each} is {code}." for each, code in codes.items())
    asked = chosen[4]
    prompt = f"{facts} What is the code of {asked}?"
    arguments = [workers.prefill[0].facts["control"], name, str(DEMO_FOLDER), prompt]
    path = {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = run_forked("kv_sink", arguments, env | path, kind="worker")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["valid"]
    assert result["checksums_equal"], "the pulled bytes are not the source's"
    assert result["num_blocks"] >= 4
    assert result["offers"] >= 2, "nothing was offered before the last chunk"
    assert result["difference"] < 1e-4, "the pulled KV is not that of this prompt"
    assert result["own"] == codes[asked]
    assert result["pulled"] == codes[asked]
    wrong = [block for block, answer in enumerate(result["corrupted"]) if answer != codes[asked]]
    assert wrong, f"no corrupted block changed the answer: {result}"
    print(f"corrupting any of blocks {wrong} of {result['num_blocks']} changes the answer")
    workers.wait_for_baseline()
