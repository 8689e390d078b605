"""A step of ``BeamSearch``: which rows belong to which slots, its checks, op and coverage."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode._ops import ops
from lmdecode.beam.engine.request import BeamRequest, token_rules_of_request
from lmdecode.beam.engine.slots import BeamSlots
from lmdecode.beam.search_arguments import SearchOfStep, rules_of_step, searches_of_step
from lmdecode.beam.state import SEARCH_DIALECTS
from lmdecode.beam.token_rules import TokenRules, join_token_rules
from lmdecode.beam.types import BeamCandidates

__all__ = [
    "BeamPlan",
    "Chooser",
    "Coverage",
    "PlannedSearch",
    "RunningSearch",
    "StepChoice",
    "check_step",
    "make_plan",
    "rules_of_plan",
]

_OP = "BeamSearch.step"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Coverage logarithms are summed as integers of this unit: exactly, in whatever order.
_UNITS = float(1 << 32)


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

    Searches of later groups come after searches of earlier ones.
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
    """Return the offsets of consecutive runs of these lengths, with the end of the last."""
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


def _check_tensor(
    name: str,
    tensor: object,
    shape: tuple[int, int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    why: str = "",
) -> None:
    """Refuse anything but a tensor of this kind; a size given as a word may be any."""
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        raise TypeError(f"{_OP}: {name} is of type {kind}; expected a tensor")
    rows, columns = shape
    if (
        tensor.dim() != 2
        or tensor.shape[0] != rows
        or (isinstance(columns, int) and tensor.shape[1] != columns)
    ):
        raise ValueError(
            f"{_OP}: {name} has shape {list(tensor.shape)}; expected [{rows}, {columns}]{why}"
        )
    if tensor.dtype not in dtypes:
        dtype, *expected = (str(d).removeprefix("torch.") for d in (tensor.dtype, *dtypes))
        raise ValueError(f"{_OP}: {name} has dtype {dtype}; expected {' or '.join(expected)}")
    if tensor.device.type != device.type:
        raise ValueError(
            f"{_OP}: {name} is on {tensor.device}; expected the device of the engine, {device}"
        )


def check_step(
    running: Sequence[RunningSearch],
    vocab_size: int | None,
    device: torch.device,
    logits: object,
    attention: object,
    token_bitmask: object,
) -> None:
    """Check the arguments of ``BeamSearch.step``."""
    rows = sum(search.num_rows for search in running)
    _check_tensor(
        "logits",
        logits,
        (rows, "vocab" if vocab_size is None else vocab_size),
        _FLOATS,
        device,
        ": one row for a request that has just been inserted, then one for each beam",
    )
    assert isinstance(logits, Tensor)
    for search in running:
        if search.request.trie is not None:
            search.request.trie.check_vocab(_OP, logits.shape[1])
    if logits.shape[1] < 1:
        raise ValueError(
            f"{_OP}: logits has shape {list(logits.shape)}; expected a vocab of at least 1"
        )
    if attention is not None:
        _check_tensor("attention", attention, (rows, "source"), _FLOATS, device)
    elif any(search.request.coverage_penalty for search in running):
        raise ValueError(
            f"{_OP}: attention is None; expected [{rows}, source]: a request has a coverage_penalty"
        )
    if token_bitmask is not None:
        words = -(-logits.shape[1] // 32)
        _check_tensor("token_bitmask", token_bitmask, (rows, words), (torch.int32,), device)


class StepChoice(NamedTuple):
    """The next beams of a step: ``tokens`` and ``parents`` are [next rows] int64.

    ``ended`` has 0 (continues), 1 (done) or 2 (failed) for each search of the plan, ``traced`` its
    candidates and a row of decisions where a trace was asked for.
    """

    tokens: Tensor
    parents: Tensor
    ended: list[int]
    traced: list[tuple[BeamCandidates, Tensor]]


class Chooser:
    """Chooses the next beams of a plan's searches in one op, on the store's device."""

    def __init__(self, plan: BeamPlan, store: BeamSlots, vocab_size: int) -> None:
        searches, self._passes = searches_of_step(plan.searches())
        self._searches = store.integers(searches)
        rules = join_token_rules(rules_of_plan(plan, vocab_size))
        tries = [entry.search.request.trie for entry in plan.entries]
        self._rules = rules_of_step(rules, store.device, tries)
        self._count = max(entry.search.request.num_candidates for entry in plan.entries)
        self._state, self._parameters = list(store.state), list(store.parameters)
        self._nodes, self._num_next_rows = store.nodes, plan.num_next_rows

    def choose(
        self, logits: Tensor, token_bitmask: Tensor | None, bonus: Tensor | None, traces: bool
    ) -> StepChoice:
        """Choose the next beams from [rows, V] logits; bonus: [searches, beams of the state]."""
        trace = self._new_trace() if traces else []
        tokens, parents, ended = ops.beam_search_step_(
            logits,
            self._state,
            self._parameters,
            self._rules,
            self._searches,
            self._nodes,
            self._passes,
            self._count,
            self._num_next_rows,
            token_bitmask,
            bonus,
            False,  # fills_missing
            False,  # greedy
            trace,
        )
        traced = []
        if traces:
            scores, log_probs, candidates, beams, decisions, status = trace
            of_all = BeamCandidates(scores, candidates, beams, status, log_probs)
            traced = [
                (BeamCandidates(*(tensor[i] for tensor in of_all)), decisions[i])
                for i in range(len(status))
            ]
        # The one place where the host waits for a device.
        return StepChoice(tokens, parents, ended.tolist(), traced)

    def _new_trace(self) -> list[Tensor]:
        shape, device = (len(self._searches), self._count), self._searches.device
        dtypes = (torch.float32, torch.float32, torch.int64, torch.int64, torch.int32)
        return [
            *(torch.empty(shape, dtype=dtype, device=device) for dtype in dtypes),
            torch.empty(shape[0], dtype=torch.uint8, device=device),
        ]


def rules_of_plan(plan: BeamPlan, vocab_size: int) -> list[TokenRules]:
    """Return the rules of each search of a plan, which are made once a request."""
    rules = []
    for entry in plan.entries:
        search = entry.search
        if search.token_rules is None:
            search.token_rules = token_rules_of_request(search.request, vocab_size)
        rules.append(search.token_rules)
    return rules


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
        # [N] of each next beam: its place in the state, its row of the next call, and the offset
        # from its parent's row of the logits to the row in [W]
        self._next_beams = ints([entry.slot * store.num_beams + beam for _, entry, beam in beams])
        self._next_rows = ints([entry.next_row + beam for _, entry, beam in beams])
        self._shift = ints([starts[i] - entry.first_row for i, entry, _ in beams])
        self._store = store

    def add(self, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Add a step's attention [rows, source]; return coverage [W, source], bonus [n, beams].

        The attention is detached, or the state would hold the graph of every step.
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
