"""Which rows of the logits belong to which slots: worked out when the batch changes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest
from lmdecode.beam.engine.slots import BeamSlots
from lmdecode.beam.state import Rules
from lmdecode.beam.token_rules import TokenRules
from lmdecode.beam.trie import Trie

__all__ = ["BeamPass", "BeamPlan", "RunningSearch", "next_beams_of"]


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


@dataclass(frozen=True)
class BeamPass:
    """What ``log_softmax_top_k`` and ``beam_step`` do in one call: at most one group a request.

    Its requests have the same rules, and the same trie or none.

    R are its searches, W their rows of the logits, N the rows that they will have.
    """

    searches: list[RunningSearch]
    group: int
    rules: Rules
    num_candidates: int
    rows: Tensor | None  # [W] of the logits; None: all, in order
    widths: int | Tensor  # [R] rows of each search
    slots: Tensor  # [R]
    beams: Tensor  # [W] slot * beams + beam, in the state
    row_offsets: Tensor  # [R + 1] of the next rows, within the pass
    num_next_rows: int  # N
    first_rows: list[int]  # R: of each search, in the logits
    parent_offsets: Tensor  # [R] the same on the device
    # [N]: parents are held to these rows of the logits; None: they are always within
    parent_bounds: tuple[Tensor, Tensor] | None
    next_rows: Tensor | None  # [N] places among all next rows; None: all, in order
    # [R] beams that a search of one row is to have, 0: it has all its rows; None: all have
    first_widths: Tensor | None
    # [R, D] places among all next rows of what earlier groups chose, -1: none; None: first group
    diversity: Tensor | None
    trie: Trie | None


@dataclass(frozen=True)
class BeamPlan:
    """The passes of one step."""

    passes: list[BeamPass]
    num_next_rows: int
    slots: Tensor  # of all searches, group after group


def make_plan(running: Sequence[RunningSearch], store: BeamSlots) -> BeamPlan:
    """Lay out a step of these searches, whose rows stand in this order."""
    first_rows = _starts([search.num_rows for search in running])
    next_rows = _starts([search.request.num_beams for search in running])
    passes = []
    order = {rules: number for number, rules in enumerate(("generate", "scorer", "fairseq"))}
    tries = dict.fromkeys(id(search.request.trie) for search in running)
    numbers = {trie: number for number, trie in enumerate(tries)}

    def kind(search: RunningSearch) -> tuple[Rules, int]:
        return search.request.rules, numbers[id(search.request.trie)]

    keys = {
        (group, *kind(search))
        for search in running
        for group in range(search.request.num_beam_groups)
    }
    for group, rules, trie in sorted(keys, key=lambda key: (key[0], order[key[1]], key[2])):
        members = [
            number
            for number, search in enumerate(running)
            if kind(search) == (rules, trie) and group < search.request.num_beam_groups
        ]
        passes.append(
            _make_pass(
                [running[number] for number in members],
                group,
                rules,
                [first_rows[number] for number in members],
                [next_rows[number] for number in members],
                store,
                whole=len(keys) == 1,
            )
        )
    slots = [slot for search in running for slot in search.slots]
    return BeamPlan(passes, next_rows[-1], store.integers(slots))


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)]


def _make_pass(
    searches: list[RunningSearch],
    group: int,
    rules: Rules,
    first_rows: list[int],
    next_rows: list[int],
    store: BeamSlots,
    *,
    whole: bool,
) -> BeamPass:
    """Lay out a pass.

    first_rows, next_rows: where those of each search begin, of all its groups; whole: there is no
    other pass.
    """
    ints = store.integers
    slots = [search.slots[group] for search in searches]
    widths = [search.row_group_size for search in searches]
    sizes = [search.request.group_size for search in searches]
    parents = [row + s.first_row(group) for row, s in zip(first_rows, searches, strict=True)]
    starts = [row + group * size for row, size in zip(next_rows, sizes, strict=True)]
    is_first = [search.steps == 0 for search in searches]
    # A beam that exists only in name, or a group that is done, may name a row it has not.
    bounded = any(is_first) or rules == "scorer"
    last = [row + width - 1 for row, width in zip(parents, widths, strict=True)]

    def each(values: Sequence[int], counts: Sequence[int]) -> list[int]:
        return [v for v, count in zip(values, counts, strict=True) for _ in range(count)]

    def ranges(starts: Sequence[int], counts: Sequence[int]) -> list[int]:
        return [s + i for s, count in zip(starts, counts, strict=True) for i in range(count)]

    diversity = None
    if group:
        most = max(group * size for size in sizes)
        diversity = ints(
            [
                [*range(row, row + group * size), *[-1] * (most - group * size)]
                for row, size in zip(next_rows, sizes, strict=True)
            ]
        )
    return BeamPass(
        searches=searches,
        group=group,
        rules=rules,
        num_candidates=max(search.request.num_candidates for search in searches),
        rows=None if whole else ints(ranges(parents, widths)),
        widths=widths[0] if len(set(widths)) == 1 else ints(widths),
        slots=ints(slots),
        beams=ints(ranges([slot * store.num_beams for slot in slots], widths)),
        row_offsets=ints(_starts(sizes)),
        num_next_rows=sum(sizes),
        first_rows=parents,
        parent_offsets=ints(parents),
        parent_bounds=(ints(each(parents, sizes)), ints(each(last, sizes))) if bounded else None,
        next_rows=None if whole else ints(ranges(starts, sizes)),
        first_widths=(
            ints([size if first else 0 for size, first in zip(sizes, is_first, strict=True)])
            if any(is_first)
            else None
        ),
        diversity=diversity,
        trie=searches[0].request.trie,
    )


def next_beams_of(layout: BeamPass, store: BeamSlots) -> tuple[Tensor, Tensor]:
    """Return where the next rows of a pass are kept, and how to find their parents.

    Returns
    -------
    tuple of Tensor
        [N] slot * beams + beam, in the state; and [N], what takes the row of the logits that is its
        parent to a row of the pass.
    """
    sizes = [search.request.group_size for search in layout.searches]
    starts = _starts([search.row_group_size for search in layout.searches])
    beams = [
        search.slots[layout.group] * store.num_beams + beam
        for search, size in zip(layout.searches, sizes, strict=True)
        for beam in range(size)
    ]
    shifts = [
        start - row
        for start, row, size in zip(starts, layout.first_rows, sizes, strict=False)
        for _ in range(size)
    ]
    return store.integers(beams), store.integers(shifts)
