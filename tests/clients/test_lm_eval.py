"""EleutherAI's evaluation harness, `lm-eval`, with its model for completions and tasks of these tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

NAMES = ("Mira", "Otto", "Anna", "Emma")
CODES = ("4817", "2093", "7150", "3364")
TASKS = Path(__file__).with_name("lm_eval_tasks")


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """The tasks, with the questions where they look for them: no hub is asked."""
    folder = tmp_path_factory.mktemp("tasks")
    facts = " ".join(f"The code of {name} is {code}." for name, code in zip(NAMES, CODES, strict=True))
    rows = [
        {"facts": facts, "question": f"What is the code of {name}?", "code": code, "codes": CODES, "right": right}
        for right, (name, code) in enumerate(zip(NAMES, CODES, strict=True))
    ]
    data = folder / "facts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task in TASKS.glob("*.yaml"):
        (folder / task.name).write_text(task.read_text().replace("FACTS", str(data)))
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(task: str, tasks: TaskManager, base_url: str, model: str, tokenizer: Path, **more: Any) -> Any:
    """The results of a task, and its samples."""
    arguments = {
        "model": model,
        "base_url": f"{base_url}/completions",
        "tokenizer": str(tokenizer),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
        "max_length": 2048,
        **more,
    }
    found = simple_evaluate(
        model="local-completions", model_args=arguments, tasks=[task], task_manager=tasks, bootstrap_iters=0
    )
    assert found["n-samples"][task]["effective"] == len(NAMES)
    return found["results"][task]


@pytest.mark.parametrize("tokenized", [True, False])
def test_generate_until(tasks: TaskManager, base_url: str, model: str, model_folder: Path, tokenized: bool) -> None:
    """With prompts as token ids, and as text; every answer is right."""
    results = evaluated("look_up", tasks, base_url, model, model_folder, tokenized_requests=tokenized)
    assert results["exact_match,code"] == 1.0


@pytest.mark.parametrize("tokenized", [True, False])
def test_multiple_choice(tasks: TaskManager, base_url: str, model: str, model_folder: Path, tokenized: bool) -> None:
    """By log probabilities of the prompt; the right answer is the most likely one."""
    results = evaluated("choose", tasks, base_url, model, model_folder, tokenized_requests=tokenized)
    assert results["acc,none"] == 1.0
