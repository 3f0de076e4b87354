"""Trains the demo model: a tiny Llama whose one skill is to answer questions from facts in its prompt.

The text is synthetic (``corpus``), and so is the tokenizer (``tokenizer``). A run is fixed by its seed, its number of
steps and its number of threads; floating-point sums in another order, as on another machine, give a sibling model.
The folder it writes loads with ``AutoModelForCausalLM`` and ``AutoTokenizer`` as it stands.

    python -m benchmarks.demo_model.train --out DIR          train, write the model to DIR, print its accuracy
    python -m benchmarks.demo_model.train --out DIR --only-evaluate   only print the accuracy of the model in DIR

The number of facts grows as the model learns: it rises to the next level once the recent answers are nearly all right.
An answer counts as right if greedy decoding gives its four digits, then the end, and nothing else.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import torch
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from benchmarks.command import call
from benchmarks.demo_model import corpus
from benchmarks.demo_model.corpus import Form, Segment
from benchmarks.demo_model.initial import HIDDEN, initialise
from benchmarks.demo_model.tokenizer import SPACE, build_tokenizer
from common.runtime.checkpoint import DEMO_FOLDER

MAX_POSITIONS = 2048
IGNORED = -100  # cross_entropy's label for a position without loss

BATCH_TOKENS = 2500
PEAK_LR, WARMUP_STEPS, WEIGHT_DECAY, MAX_GRAD_NORM = 1.5e-3, 100, 0.01, 1.0
LEVELS = (4, 8, 16, 32, 64, 96)  # most facts in a document, level by level
FEW_FACTS = 16
LEVEL_UP_ACCURACY, ACCURACY_DECAY = 0.95, 0.95
NUM_QUESTIONS = 8

EVALUATED_FACTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
EVALUATED_FORMS = {
    "chat": Form(is_chat=True),
    "chat, lines": Form(is_chat=True, separator="\n", question_separator="\n"),
    "chat + system": Form(is_chat=True, system=corpus.SYSTEM_TEXTS[0]),
    "chat + newline": Form(is_chat=True, chat_suffix="\n"),
    "chat + filler": Form(is_chat=True, filler_rate=0.4),
    "facts in system": Form(is_chat=True, facts_in_system=True),
    "chat, turn 3": Form(is_chat=True),
    "raw": Form(is_chat=False, has_begin=False),
    "raw + newline": Form(is_chat=False, has_begin=False, raw_ending="\n"),
    "raw + Answer:": Form(is_chat=False, has_begin=False, raw_ending="\nAnswer:"),
    "raw, lines": Form(is_chat=False, has_begin=False, separator="\n", question_separator="\n"),
}


@dataclass(slots=True, kw_only=True)
class Batch:
    """Token ids and labels, both int64 of shape [documents, positions], padded on the right."""

    ids: torch.Tensor
    labels: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Curriculum:
    """Which level the run is at, and how many of the recent answers were right."""

    level: int = 0
    accuracy: float = 0.0

    def observe(self, batch_accuracy: float) -> None:
        self.accuracy = ACCURACY_DECAY * self.accuracy + (1 - ACCURACY_DECAY) * batch_accuracy
        if self.accuracy > LEVEL_UP_ACCURACY and self.level + 1 < len(LEVELS):
            self.level, self.accuracy = self.level + 1, 0.0

    def draw_num_facts(self, rng: random.Random) -> int:
        """Half of the batches stay within ``FEW_FACTS``, so that the long ones do not crowd out the short ones."""
        most = LEVELS[self.level]
        return rng.randint(2, min(most, FEW_FACTS) if rng.random() < 0.5 else most)


def build_model(tokenizer: PreTrainedTokenizerFast, names: list[str]) -> LlamaForCausalLM:
    """A Llama of 0.5 million parameters, with two query heads to each KV head, in its initial state."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    initialise(model, [tokenizer.convert_tokens_to_ids([name, SPACE + name]) for name in names])
    return model


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Sequence[Segment]]) -> Batch:
    """Turns documents into a batch; the label at a position is the token to predict there, if it is an answer's."""
    texts = [text for document in documents for text, _ in document]
    encoded = iter(tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    rows: list[tuple[list[int], list[int]]] = []
    for document in documents:
        ids: list[int] = []
        targets: list[int] = []
        for (_, is_answer), encoding in zip(document, encoded, strict=False):
            ids += encoding.ids
            targets += encoding.ids if is_answer else [IGNORED] * len(encoding.ids)
        rows.append((ids[:-1], targets[1:]))
    length = max(len(ids) for ids, _ in rows)
    padded_ids = [ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids, _ in rows]
    padded_targets = [targets + [IGNORED] * (length - len(targets)) for _, targets in rows]
    return Batch(ids=torch.tensor(padded_ids), labels=torch.tensor(padded_targets))


def answer_logits(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [answer tokens, vocabulary] and labels [answer tokens] at the positions that carry a label."""
    hidden_BTD = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    is_labelled_BT = batch.labels != IGNORED
    return model.lm_head(hidden_BTD[is_labelled_BT]), batch.labels[is_labelled_BT]


def exact_answers(logits_NV: torch.Tensor, batch: Batch) -> list[list[bool]]:
    """For each document, for each of its answers, whether every token is the most likely one after those before it.

    That is the same as greedy decoding giving exactly this answer.
    """
    is_labelled_BT = batch.labels != IGNORED
    is_right_BT = torch.ones_like(is_labelled_BT)
    is_right_BT[is_labelled_BT] = logits_NV.argmax(-1) == batch.labels[is_labelled_BT]
    results: list[list[bool]] = []
    for row in zip(is_labelled_BT.tolist(), is_right_BT.tolist(), strict=True):
        stretches = groupby(zip(*row, strict=True), key=itemgetter(0))
        results.append([all(is_right for _, is_right in stretch) for is_answer, stretch in stretches if is_answer])
    return results


def learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    return PEAK_LR * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def training_batch(
    rng: random.Random, names: list[str], tokenizer: PreTrainedTokenizerFast, curriculum: Curriculum
) -> Batch:
    """Documents with the same number of facts, about ``BATCH_TOKENS`` tokens in all."""
    num_facts = curriculum.draw_num_facts(rng)
    num_documents = max(4, BATCH_TOKENS // (13 * num_facts + 15 * NUM_QUESTIONS + 5))
    documents = [corpus.training_document(rng, names, num_facts, NUM_QUESTIONS) for _ in range(num_documents)]
    return encode(tokenizer, documents)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    names: list[str],
    seed: int,
    num_steps: int,
    out: Path,
    save_every: int,
) -> None:
    rng = random.Random(seed)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), fused=True)
    curriculum = Curriculum()
    start = time.monotonic()
    num_tokens = 0
    model.train()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps)
        batch = training_batch(rng, names, tokenizer, curriculum)
        logits_NV, labels_N = answer_logits(model, batch)
        loss = functional.cross_entropy(logits_NV, labels_N)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        answers = [right for document in exact_answers(logits_NV, batch) for right in document]
        curriculum.observe(sum(answers) / len(answers))
        num_tokens += batch.ids.numel()
        if step % 50 == 0 or step + 1 == num_steps:
            print(
                f"step {step:5d}  up to {LEVELS[curriculum.level]:2d} facts  loss {loss.item():.4f}  "
                f"right {curriculum.accuracy:.3f}  {num_tokens / 1e6:.1f} Mtokens  {time.monotonic() - start:.0f} s",
                flush=True,
            )
        if (step + 1) % save_every == 0 or step + 1 == num_steps:
            save(model, tokenizer, out)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the folder file by file, each by an atomic rename, so that a reader never meets half a file."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".saving-") as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary, save_jinja_files=False)
        GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            do_sample=False,
        ).save_pretrained(temporary)
        settings_file = Path(temporary, "tokenizer_config.json")
        settings = json.loads(settings_file.read_text(encoding="utf-8"))
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 and 5 both know
        settings_file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        for path in sorted(Path(temporary).iterdir()):
            path.chmod(0o644)
            os.replace(path, out / path.name)
    if out.resolve() != DEMO_FOLDER:
        shutil.copyfile(corpus.NAMES_FILE, out / corpus.NAMES_FILE.name)


def evaluation_document(rng: random.Random, names: list[str], num_facts: int, label: str) -> list[Segment]:
    """The one question that counts is the last: the first of its conversation, or the third in ``chat, turn 3``."""
    form = EVALUATED_FORMS[label]
    facts = corpus.draw_facts(rng, names, num_facts)
    num_questions = 3 if label == "chat, turn 3" else 1
    asked = rng.sample(list(facts.items()), min(num_questions, num_facts))
    return corpus.write_document(corpus.write_facts(rng, facts, form), asked, form)


@torch.inference_mode()
def evaluate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, names: list[str], seed: int, num_prompts: int
) -> dict[tuple[int, str], float]:
    """Share of exact answers for each number of facts and form, and prints them as a Markdown table."""
    model.eval()
    rng = random.Random(f"evaluation {seed}")
    print("| facts | " + " | ".join(EVALUATED_FORMS) + " |")
    print("|" + " ---: |" * (1 + len(EVALUATED_FORMS)))
    shares: dict[tuple[int, str], float] = {}
    for num_facts in EVALUATED_FACTS:
        num_drawn = num_prompts if num_facts <= FEW_FACTS else max(1, num_prompts // 5)
        for label in EVALUATED_FORMS:
            num_right = 0
            for first in range(0, num_drawn, 50):
                num_documents = min(50, num_drawn - first)
                documents = [evaluation_document(rng, names, num_facts, label) for _ in range(num_documents)]
                batch = encode(tokenizer, documents)
                num_right += sum(answers[-1] for answers in exact_answers(answer_logits(model, batch)[0], batch))
            shares[num_facts, label] = num_right / num_drawn
        cells = [f"{100 * shares[num_facts, label]:.1f}" for label in EVALUATED_FORMS]
        print(f"| {num_facts} | " + " | ".join(cells) + " |", flush=True)
    return shares


def train_or_evaluate(
    *,
    out: Annotated[Path, "folder of the model"] = DEMO_FOLDER,
    seed: int = 0,
    steps: Annotated[int, "optimizer steps"] = 900,
    threads: Annotated[int, "CPU threads"] = 1,
    save_every: Annotated[int, "steps between saves to the folder"] = 100,
    prompts: Annotated[int, "evaluation prompts per number of facts and form, a fifth beyond 16"] = 500,
    only_evaluate: Annotated[bool, "do not train, evaluate the model in the folder"] = False,
) -> None:
    """Train the model, unless told otherwise, and print its accuracy."""
    disable_progress_bar()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    names = corpus.load_names()
    start = time.monotonic()
    if not only_evaluate:
        tokenizer = build_tokenizer(names, MAX_POSITIONS)
        train(
            build_model(tokenizer, names),
            tokenizer,
            names=names,
            seed=seed,
            num_steps=steps,
            out=out,
            save_every=save_every,
        )
        print(f"trained in {(time.monotonic() - start) / 60:.1f} minutes")
    evaluate(
        AutoModelForCausalLM.from_pretrained(out),
        AutoTokenizer.from_pretrained(out),
        names=names,
        seed=seed,
        num_prompts=prompts,
    )


if __name__ == "__main__":
    call(train_or_evaluate, __doc__)
