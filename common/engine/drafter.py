"""The draft model of a worker: a second, small model, which says what the first one is likely to say next.

Shapes: S sequences of which tokens are drafted, M blocks of the longest of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from common.contract.sampling import SamplingParams
from common.engine.batch import NO_SAMPLE, Decodes, Drafted, Drafting, Ints, Samples, Slice
from common.engine.runner import ModelRunner, Submitted
from common.scheduling.row_times import RowTimes


@dataclass(slots=True)
class Drafter:
    """A draft model with its cache. Not thread-safe: the engine's thread calls it."""

    runner: ModelRunner
    row_times: RowTimes
    """What steps of decodes of the draft model take."""
    vocab_size: int
    """That of the model whose tokens are drafted."""

    def draft(self, drafting: Drafting, decodes: Decodes | None) -> tuple[Drafted, Decodes | None]:
        """Draft tokens; returns them, and `decodes` with them in place.

        Each token is drawn with the parameters and the random number of its position, as the token that it is compared
        with will be. So a draft model that is nearly as certain says the same also where the most likely token is not
        the one that is drawn. Biases count, and penalties do not.
        """
        begin = time.perf_counter()
        if decodes is None or not len(drafting.rows_S):
            self.runner.submit(self._known(drafting.slices)).chosen()
            return Drafted(seconds=time.perf_counter() - begin), decodes
        # The sequences with the longest drafts first: those that go on are then the leading ones of each pass.
        order_S = np.argsort(-drafting.nums_S, kind="stable")
        rows_S, nums_S = drafting.rows_S[order_S], drafting.nums_S[order_S]
        tables = [drafting.tables[index] for index in order_S.tolist()]
        passes: list[Submitted] = []
        for place in range(int(nums_S[0])):
            num = int((nums_S > place).sum())
            one = self._decodes(decodes, rows_S[:num], tables[:num], place)
            passes.append(self.runner.submit(() if place else self._known(drafting.slices), one))
        said = [each.chosen().token_ids for each in passes]
        token_ids: list[list[int]] = [[]] * len(order_S)
        for index, (sequence, num) in enumerate(zip(order_S.tolist(), nums_S.tolist(), strict=True)):
            token_ids[sequence] = [max(0, min(said[place][index], self.vocab_size - 1)) for place in range(num)]
        return Drafted(token_ids, time.perf_counter() - begin), _filled(decodes, drafting.rows_S, token_ids)

    def _known(self, slices: Sequence[Slice]) -> Sequence[Slice]:
        """The slices, with tokens that the draft model has. A vocabulary may be padded, and is the larger one then."""
        size = self.runner.config.vocab_size
        if size >= self.vocab_size:
            return slices
        return [replace(each, token_ids=[min(token, size - 1) for token in each.token_ids]) for each in slices]

    def _decodes(self, decodes: Decodes, rows_S: Ints, tables: Sequence[Sequence[int]], place: int) -> Decodes:
        """The pass that draws the drafted tokens at `place`: the last tokens, or what the pass before has drawn."""
        num_blocks_S = np.fromiter(map(len, tables), np.int64, len(tables))
        tables_SM = np.zeros((len(tables), int(num_blocks_S.max())), np.int64)
        for row, table in enumerate(tables):
            tables_SM[row, : len(table)] = table
        samples = decodes.samples
        biased = {index: samples.special[row] for index, row in enumerate(rows_S.tolist()) if row in samples.special}
        return Decodes(
            token_ids_D=np.minimum(decodes.token_ids_D[rows_S], self.runner.config.vocab_size - 1),
            positions_D=decodes.positions_D[rows_S] + place,
            num_blocks_D=num_blocks_S,
            tables_DM=tables_SM,
            follows_D=np.arange(len(rows_S)) if place else np.full(len(rows_S), NO_SAMPLE),
            samples=Samples(
                parameters_N=samples.parameters_N[rows_S],
                positions_N=samples.positions_N[rows_S] + place,
                special={
                    index: replace(each, params=_biased(each.params))
                    for index, each in biased.items()
                    if each.params.logit_bias
                },
            ),
        )


@lru_cache(maxsize=256)
def _biased(params: SamplingParams) -> SamplingParams:
    """The parameters without what depends on the tokens before."""
    return SamplingParams(max_tokens=1, temperature=params.temperature, logit_bias=params.logit_bias)


def _filled(decodes: Decodes, rows_S: Ints, drafts: Sequence[Sequence[int]]) -> Decodes:
    """`decodes` with drafted tokens in the rows after `rows_S`."""
    token_ids_D = decodes.token_ids_D.copy()
    special = dict(decodes.samples.special)
    for row, draft in zip(rows_S.tolist(), drafts, strict=True):
        token_ids_D[row + 1 : row + 1 + len(draft)] = draft
        for place in range(1, len(draft) + 1):
            if row + place in special:
                special[row + place] = replace(special[row + place], draft=draft[:place])
    samples = replace(decodes.samples, special=special)
    return replace(decodes, token_ids_D=token_ids_D, samples=samples)
