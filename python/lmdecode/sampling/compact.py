"""Sequences of a ``Sampler`` in its first rows, without gaps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmdecode._ops import ops
from lmdecode.sampling._results import Results, new_results, new_zeros
from lmdecode.sampling.sampler import Sampler
from lmdecode.sampling.sampler_rows import RowRules

__all__ = ["CompactSampler", "Results"]

_ACCEPT, _RAW = 1, 2  # flags of the op
_step = ops.sampler_step_.default


class CompactSampler:
    """A ``Sampler`` with its sequences in the first rows; a step computes only these.

    Parameters
    ----------
    rows, vocab, dialect
        As ``batch``, ``vocab`` and ``dialect`` of ``Sampler``; ``rows`` limits the sequences.
    """

    def __init__(self, rows: int, vocab: int, dialect: str) -> None:
        self._sampler = Sampler(rows, vocab, dialect=dialect, temperature=0.0, seed=0)
        self._sampler._remove_all()
        self._results: tuple[tuple[int, int], Results] | None = None
        self.count = 0

    def begin(self, prompt: Tensor, rules: RowRules) -> None:
        """Begin a sequence, [n] int64 tokens, in the row after the others."""
        self._sampler._begin(self.count, rules, prompt)
        self.count += 1

    def end(self, row: int) -> None:
        """End the sequence of a row; the last one moves there."""
        sampler = self._sampler
        last = self.count - 1
        if row < last:
            sampler._state[row] = sampler._state[last]
        sampler.remove(last)
        self.count = last

    def step(
        self, logits: Tensor, bitmask: Tensor | None, num_logprobs: int, first: int = 0
    ) -> Results:
        """Choose a token for each sequence from row ``first`` on, and append it.

        Parameters
        ----------
        logits : Tensor
            [n, V] float32, contiguous rows.
        bitmask : Tensor or None
            [n, ceil(V / 32)] int32, see ``Sampler.sample``.
        num_logprobs : int
            -1: none; else as of ``Sampler``, for the input logits.
        first : int
            The first of these rows.

        Returns
        -------
        Results
            Results of n rows; the next step of as many rows overwrites them.
        """
        sampler, count = self._sampler, len(logits)
        key = count, num_logprobs
        if self._results is None or self._results[0] != key:
            self._results = key, new_results(count, num_logprobs, False, sampler.device)
        results = self._results[1]
        sampler._room_for_steps(1)
        _step(
            sampler._state[first : first + count], logits, bitmask, results.memory, None, None,
            None, *sampler._sizes, num_logprobs, _ACCEPT | _RAW,
        )  # fmt: skip
        sampler._steps += 1
        return results

    def verify(
        self, logits: Tensor, draft: Tensor, first: int = 0
    ) -> tuple[list[list[int]], list[int]]:
        """Choose tokens while they are those of a draft, and one more, as ``verify_draft`` does.

        Parameters
        ----------
        logits : Tensor
            [n, D + 1, V] float32, contiguous.
        draft : Tensor
            [n, D] int64.
        first : int
            The first of n rows.

        Returns
        -------
        (list of list of int, list of int)
            The chosen tokens, which are appended to the sequences, and a status of each row, as in
            ``SamplerOutput``. A row with a status other than 0 is left as it was, without tokens.
        """
        sampler, (count, width) = self._sampler, draft.shape
        sampler._room_for_steps(width + 1)
        results = new_results(count, -1, False, sampler.device)
        tokens = new_zeros(count, width + 1, dtype=torch.int64)
        path = new_zeros(count, width, dtype=torch.int64)
        accepted = new_zeros(count, dtype=torch.int64)
        ops.sampler_verify_(
            sampler._state[first : first + count], logits, None, draft, None, None, None,
            results.memory, tokens, path, accepted, *sampler._sizes, False,
        )  # fmt: skip
        sampler._steps += width + 1
        status, chosen = results.status.tolist(), []
        for row, (line, right) in enumerate(zip(tokens.tolist(), accepted.tolist(), strict=True)):
            if status[row]:
                self.rewind(first + row, right + 1)
            chosen.append([] if status[row] else line[: right + 1])
        return chosen, status

    def accept(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens, below the vocabulary's size, to the sequence of a row."""
        sampler = self._sampler
        sampler._room_for_steps(len(tokens))
        ids = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        ops.sampler_accept_(sampler._state, *sampler._sizes, row, ids)
        sampler._steps += len(tokens)

    def rewind(self, row: int, n: int) -> None:
        """Remove the last n chosen tokens of the sequence of a row."""
        if n:
            ops.sampler_rewind_(self._sampler._state, *self._sampler._sizes, row, n)
