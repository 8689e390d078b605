"""Sequences of a ``Sampler`` in its first rows, without gaps."""

from __future__ import annotations

from torch import Tensor

from lmdecode._ops import ops
from lmdecode.sampling._results import Results, new_results
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

    def step(self, logits: Tensor, bitmask: Tensor | None, num_logprobs: int) -> Results:
        """Choose a token for each sequence, and append it.

        Parameters
        ----------
        logits : Tensor
            [count, V] float32, contiguous rows.
        bitmask : Tensor or None
            [count, ceil(V / 32)] int32, see ``Sampler.sample``.
        num_logprobs : int
            -1: none; else as of ``Sampler``, for the input logits.

        Returns
        -------
        Results
            Results of ``count`` rows; the next step with this count overwrites them.
        """
        sampler, key = self._sampler, (self.count, num_logprobs)
        if self._results is None or self._results[0] != key:
            self._results = key, new_results(self.count, num_logprobs, False, sampler.device)
        results = self._results[1]
        sampler._room_for_steps(1)
        _step(
            sampler._state[: self.count], logits, bitmask, results.memory, None, None, None,
            *sampler._sizes, num_logprobs, _ACCEPT | _RAW,
        )  # fmt: skip
        sampler._steps += 1
        return results
