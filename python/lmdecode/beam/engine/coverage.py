"""How much attention each source position has had: the coverage penalty of ``BeamSearch``."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lmdecode.beam.engine.plan import BeamPass, next_beams_of
from lmdecode.beam.engine.slots import BeamSlots

__all__ = ["PassCoverage"]

# Logarithms are summed as integers of this unit: exactly, in whatever order.
_UNITS = float(1 << 32)


class PassCoverage:
    """The coverage of the searches of one pass."""

    def __init__(self, layout: BeamPass, store: BeamSlots) -> None:
        ints = store.integers
        widths = [search.row_group_size for search in layout.searches]
        starts = [0, *itertools.accumulate(widths)]
        # [R, beams]: the row of the pass that each beam of the state has its coverage from
        self._beam_rows = ints(
            [
                start + min(beam, width - 1)
                for start, width in zip(starts, widths, strict=False)
                for beam in range(store.num_beams)
            ]
        ).view(len(widths), store.num_beams)
        penalties = [search.request.coverage_penalty for search in layout.searches]
        self._penalties = torch.tensor(
            [p for p, width in zip(penalties, widths, strict=True) for _ in range(width)],
            dtype=torch.float64, device=store.device,
        )  # fmt: skip
        self._next_beams, self._shift = next_beams_of(layout, store)
        self._layout, self._store = layout, store

    def add(self, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Add a step's attention [W, source]; return coverage [W, source] and bonus [R, beams].

        Of the values alone: the state would otherwise hold the graph of every step's attention.
        """
        source = attention.shape[1]
        flat = self._store.coverage.flatten(0, 1)[:, :source]
        coverage = flat.index_select(0, self._layout.beams) + attention.detach()
        logs = coverage.clamp(max=1.0).double().log() * _UNITS
        total = logs.masked_fill(~(coverage > 0), 0.0).round().to(torch.int64).sum(dim=1)
        bonus = (total.double() / _UNITS * self._penalties).float()
        return coverage, bonus[self._beam_rows]

    def follow(self, coverage: Tensor, parents: Tensor) -> None:
        """Give the next beams the coverage of their parents, rows of the logits."""
        flat = self._store.coverage.flatten(0, 1)[:, : coverage.shape[1]]
        flat[self._next_beams] = coverage.index_select(0, parents + self._shift)
