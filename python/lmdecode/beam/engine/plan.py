"""Which rows of the logits belong to which slots: worked out when the batch changes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmdecode.beam.engine.request import BeamRequest
from lmdecode.beam.search_arguments import SearchOfStep
from lmdecode.beam.state import SEARCH_DIALECTS
from lmdecode.beam.token_rules import TokenRules

__all__ = ["BeamPlan", "PlannedSearch", "RunningSearch", "make_plan"]


@dataclass
class RunningSearch:
    """A request that is being searched."""

    request: BeamRequest
    request_id: Hashable
    slots: list[int]  # one for each group
    steps: int = 0
    token_rules: TokenRules | None = None  # made when the vocabulary is known

    @property
    def num_rows(self) -> int:
        """Rows of the next logits: one for the prompt, then one for each beam."""
        return self.request.num_beams if self.steps else 1

    @property
    def row_group_size(self) -> int:
        """Rows of a group."""
        return self.request.group_size if self.steps else 1

    def first_row(self, group: int) -> int:
        """Return where the rows of a group begin, within those of the request."""
        return group * self.request.group_size if self.steps else 0


class PlannedSearch(NamedTuple):
    """A request in a step, or a group of one."""

    search: RunningSearch
    number: int  # of the request
    group: int
    first_row: int  # of the logits
    next_row: int  # the first of its next beams

    @property
    def slot(self) -> int:
        """Where its state is."""
        return self.search.slots[self.group]

    @property
    def num_rows(self) -> int:
        """Rows of the logits: 1 where its beams are alike."""
        return self.search.row_group_size

    @property
    def size(self) -> int:
        """Its beams."""
        return self.search.request.group_size


class BeamPlan(NamedTuple):
    """The searches of a step, in the order in which they are chosen.

    Those of later groups come after those of earlier ones.
    """

    entries: list[PlannedSearch]
    num_next_rows: int

    def searches(self) -> list[SearchOfStep]:
        """Return the searches as the step takes them, each with a row of the rules."""
        return [
            SearchOfStep(
                entry.slot, number, SEARCH_DIALECTS[entry.search.request.dialect], entry.group,
                entry.size, entry.first_row, entry.num_rows, entry.next_row,
            )
            for number, entry in enumerate(self.entries)
        ]  # fmt: skip


def starts_of(counts: Sequence[int]) -> list[int]:
    """Return where each of so many things begins, and where the last one ends."""
    return [0, *itertools.accumulate(counts)]


def make_plan(running: Sequence[RunningSearch]) -> BeamPlan:
    """Lay out a step of these searches, whose rows stand in this order."""
    first_rows = starts_of([search.num_rows for search in running])
    next_rows = starts_of([search.request.num_beams for search in running])
    entries = [
        PlannedSearch(
            search,
            number,
            group,
            first_rows[number] + search.first_row(group),
            next_rows[number] + group * search.request.group_size,
        )
        for number, search in enumerate(running)
        for group in range(search.request.num_beam_groups)
    ]
    return BeamPlan(sorted(entries, key=lambda entry: entry.group), next_rows[-1])
