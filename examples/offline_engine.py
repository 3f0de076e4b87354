"""The engine without servers: load the demo model, compute a prompt's KV, decode greedily, print the text.

.venv/bin/python examples/offline_engine.py ["a question"]
"""

from __future__ import annotations

import sys

from transformers import AutoTokenizer

from common.contract.sampling import SamplingParams
from common.engine.batch import InvalidLogitsError, Sample, Slice
from common.engine.runner import load_runner
from common.runtime.checkpoint import resolve_model

QUESTION = "The code of Mira is 4817. The code of Otto is 2093. What is the code of Mira?"
PARAMS = SamplingParams(temperature=0.0, max_tokens=32)


def main(question: str) -> None:
    """Answer one question."""
    folder = resolve_model("demo", weights=True)
    runner = load_runner(folder, kv_cache_bytes=16 * 2**20, block_size=32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    conversation = [{"role": "user", "content": question}]
    token_ids = list(tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"])
    prompt_len, num_computed = len(token_ids), 0
    # The only sequence may use the first blocks of the KV cache; a server gets them from a `BlockPool`.
    blocks = list(range(runner.layout.blocks_for(prompt_len + PARAMS.max_tokens)))
    while len(token_ids) < prompt_len + PARAMS.max_tokens and token_ids[-1] not in runner.config.eos_token_ids:
        # The first step computes [0, prompt_len), which is the prefill; each later one computes the newest token.
        position = len(token_ids)
        sample = Sample(params=PARAMS, choice=0, position=position, token_ids=token_ids, prompt_len=prompt_len)
        new = Slice(token_ids=token_ids[num_computed:], start=num_computed, block_table=blocks, samples=(sample,))
        ((sampled,),) = runner.step([new])
        if isinstance(sampled, InvalidLogitsError):
            raise sampled
        num_computed = position
        token_ids.append(sampled.token_id)
    print(tokenizer.decode(token_ids[prompt_len:], skip_special_tokens=True))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else QUESTION)
