"""llama.cpp in a process of its own, for `benchmarks.turns`: `python -m benchmarks.peers.llama_cpp THREADS`.

It runs with the interpreter of `install_llama_cpp`. Cases, with SETTINGS as in `Settings`:

* `["instructions"]`: what it was compiled for.
* `["write", FOLDER, DTYPE, FILE]`: write the checkpoint of a folder as a file, which the other cases take.
* `["prompts", FILE, SETTINGS, TOKENS]`: a prompt as one batch, and its first token.
* `["steps", FILE, SETTINGS, SEQUENCES, CONTEXT]`: a decode step, always at the same position.
* `["tokens", FILE, SETTINGS, PROMPT, NUMBER]`: continue a prompt greedily.

`llama_decode` is called directly, and the greedy token is the largest of the logits.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

_BATCH = 512
"""Most tokens of a batch, and of what llama.cpp computes at once (`n_batch`, `n_ubatch`)."""

_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}
"""`ggml_type` of each type."""
_ERROR = 4
"""`GGML_LOG_LEVEL_ERROR`: lesser messages are not shown."""


class Settings(TypedDict):
    """What is chosen for speed."""

    flash_attention: bool
    kv: str
    """Type of keys and values: float32, bfloat16 or float16."""


class Model:
    """A file whose weights were read into memory."""

    def __init__(self, file: str) -> None:
        import llama_cpp as lib

        self.file = file
        params = lib.llama_model_default_params()
        params.use_mmap = False
        self.handle = lib.llama_model_load_from_file(file.encode(), params)
        assert self.handle, f"llama.cpp does not load {file}"
        self.num_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.handle))

    def close(self) -> None:
        """Free the weights."""
        import llama_cpp as lib

        lib.llama_model_free(self.handle)


class Context:
    """A KV cache over a model, and the sequences in it, for one case."""

    def __init__(self, model: Model, settings: Settings, num_sequences: int, num_tokens: int, threads: int) -> None:
        """`num_tokens` is the most of a sequence."""
        import llama_cpp as lib

        self._lib, self._num_vocab = lib, model.num_vocab
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_sequences * -(-num_tokens // 256) * 256, num_sequences
        params.n_batch = params.n_ubatch = _BATCH
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = _TYPES[settings["kv"]]
        params.flash_attn_type = int(settings["flash_attention"])
        self._handle = lib.llama_init_from_model(model.handle, params)
        assert self._handle, f"llama.cpp does not take {settings}"
        self._memory = lib.llama_get_memory(self._handle)
        self._batch = lib.llama_batch_init(_BATCH, 0, 1)

    def decode(self, tokens: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> list[np.ndarray]:
        """Compute (token, position, sequence) of each token of a batch; return the logits of the wanted ones."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, position, sequence) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = index in wanted
        failed = self._lib.llama_decode(self._handle, batch)
        assert not failed, f"llama_decode returns {failed}"
        rows = [self._lib.llama_get_logits_ith(self._handle, index) for index in wanted]
        return [np.ctypeslib.as_array(row, (self._num_vocab,)) for row in rows]

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first tokens of every sequence."""
        for sequence in range(self._lib.llama_n_seq_max(self._handle)):
            self._lib.llama_memory_seq_rm(self._memory, sequence, num_tokens, -1)

    def copy_first(self, num_sequences: int) -> None:
        """Give the other sequences the tokens of the first one."""
        for sequence in range(1, num_sequences):
            self._lib.llama_memory_seq_cp(self._memory, 0, sequence, 0, -1)

    def close(self) -> None:
        """Free the cache."""
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._handle)


def prompt_of(num_tokens: int) -> list[tuple[int, int, int]]:
    """A batch with the first tokens of the first sequence."""
    return [(7 * position % 250 + 5, position, 0) for position in range(num_tokens)]


def _prompt(context: Context, num_tokens: int) -> Callable[[], None]:
    batch = prompt_of(num_tokens)

    def run() -> None:
        context.truncate(0)
        [logits] = context.decode(batch, [num_tokens - 1])
        logits.argmax()

    return run


def _step(context: Context, num_sequences: int, num_tokens: int) -> Callable[[], None]:
    context.decode(prompt_of(num_tokens), [])
    context.copy_first(num_sequences)
    batch = [(sequence + 5, num_tokens, sequence) for sequence in range(num_sequences)]

    def run() -> None:
        context.truncate(num_tokens)
        for logits in context.decode(batch, range(num_sequences)):
            logits.argmax()

    return run


def _tokens(context: Context, prompt: list[int], num_tokens: int) -> Callable[[], list[tuple[int, float]]]:
    def run() -> list[tuple[int, float]]:
        context.truncate(0)
        ids, found = list(prompt), []
        batch = [(token, position, 0) for position, token in enumerate(prompt)]
        for _ in range(num_tokens):
            [logits] = context.decode(batch, [len(batch) - 1])
            exact = logits.astype(np.float64)
            token = int(exact.argmax())
            found.append((token, float(-np.log(np.exp(exact - exact[token]).sum()))))
            batch = [(token, len(ids), 0)]
            ids.append(token)
        return found

    return run


class Turns:
    """Computes cases, one after another; weights stay for cases that follow with the same ones."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._model: Model | None = None
        self._case: list[Any] | None = None
        self._context: Context | None = None
        self._run: Callable[[], object] = lambda: None

    def take(self, case: list[Any]) -> object:
        """Run a case; return its result, or the seconds that it took."""
        if case != self._case:
            self._prepare(*case)
            self._run()
            self._case = case
        begin = time.perf_counter()
        result = self._run()
        seconds = time.perf_counter() - begin
        return seconds if result is None else result

    def _prepare(self, kind: str, file: str, settings: Settings, *sizes: Any) -> None:
        if self._context is not None:
            self._context.close()
        if self._model is not None and self._model.file != file:
            self._model.close()
            self._model = None
        if self._model is None:
            self._model = Model(file)
        num_sequences = sizes[0] if kind == "steps" else 1
        num_tokens = {"prompts": sizes[0], "steps": sizes[-1] + 1, "tokens": _BATCH}[kind]
        self._context = Context(self._model, settings, num_sequences, num_tokens, self._threads)
        prepare: dict[str, Callable[..., Callable[[], object]]]
        prepare = {"prompts": _prompt, "steps": _step, "tokens": _tokens}
        self._run = prepare[kind](self._context, *sizes)


def main(threads: int) -> None:
    """Answer each line of standard input."""
    import llama_cpp as lib

    from benchmarks.peers.gguf_file import write

    errors = lib.llama_log_callback(lambda level, text, _: level == _ERROR and sys.stderr.write(text.decode()))
    lib.llama_log_set(errors, None)
    lib.llama_backend_init()
    turns = Turns(threads)
    for line in sys.stdin:
        case = json.loads(line)
        result: object = None
        if case[0] == "instructions":
            result = lib.llama_print_system_info().decode()
        elif case[0] == "write":
            write(Path(case[1]), case[2], Path(case[3]))
        else:
            result = turns.take(case)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
