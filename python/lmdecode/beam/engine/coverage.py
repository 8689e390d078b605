"""How much attention each source position has had: the coverage penalty of ``BeamSearch``."""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode.beam.engine.plan import BeamPlan, starts_of
from lmdecode.beam.engine.slots import BeamSlots

__all__ = ["Coverage"]

# Logarithms are summed as integers of this unit: exactly, in whatever order.
_UNITS = float(1 << 32)


class Coverage:
    """The coverage of the searches of a step."""

    def __init__(self, plan: BeamPlan, store: BeamSlots) -> None:
        ints, entries = store.integers, plan.entries
        starts = starts_of([entry.num_rows for entry in entries])
        rows = [(entry, row) for entry in entries for row in range(entry.num_rows)]
        beams = [(i, entry, beam) for i, entry in enumerate(entries) for beam in range(entry.size)]
        # [W]: the row of the logits, and slot * beams + beam in the state, of each row
        self._rows = ints([entry.first_row + row for entry, row in rows])
        self._beams = ints([entry.slot * store.num_beams + row for entry, row in rows])
        # [n, beams]: the row that each beam of the state has its coverage from
        self._beam_rows = ints(
            [
                start + min(beam, entry.num_rows - 1)
                for start, entry in zip(starts, entries, strict=False)
                for beam in range(store.num_beams)
            ]
        ).view(len(entries), store.num_beams)
        self._penalties = torch.tensor(
            [entry.search.request.coverage_penalty for entry, _ in rows],
            dtype=torch.float64, device=store.device,
        )  # fmt: skip
        # [N] of each next beam: its place in the state, its row of the next call, and what takes
        # the row of the logits that is its parent to one of [W]
        self._next_beams = ints([entry.slot * store.num_beams + beam for _, entry, beam in beams])
        self._next_rows = ints([entry.next_row + beam for _, entry, beam in beams])
        self._shift = ints([starts[i] - entry.first_row for i, entry, _ in beams])
        self._store = store

    def add(self, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Add a step's attention [rows, source]; return coverage [W, source], bonus [n, beams].

        Of the values alone: the state would otherwise hold the graph of every step's attention.
        """
        source = attention.shape[1]
        flat = self._store.coverage.flatten(0, 1)[:, :source]
        added = attention.detach().index_select(0, self._rows)
        coverage = flat.index_select(0, self._beams) + added
        logs = coverage.clamp(max=1.0).double().log() * _UNITS
        total = logs.masked_fill(~(coverage > 0), 0.0).round().to(torch.int64).sum(dim=1)
        bonus = (total.double() / _UNITS * self._penalties).float()
        return coverage, bonus[self._beam_rows]

    def follow(self, coverage: Tensor, parents: Tensor) -> None:
        """Give the next beams the coverage of their parents, [N] rows of the logits."""
        flat = self._store.coverage.flatten(0, 1)[:, : coverage.shape[1]]
        sources = parents.index_select(0, self._next_rows) + self._shift
        flat[self._next_beams] = coverage.index_select(0, sources)
