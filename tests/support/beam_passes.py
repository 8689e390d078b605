"""A step of ``BeamSearch`` by the ops that ``beam_search_step_`` is made of, once a pass."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.engine.slots import BeamSlots
from lmdecode.beam.engine.step import BeamPlan, PlannedSearch, StepChoice, rules_of_plan, starts_of
from lmdecode.beam.ops import beam_step, log_softmax_top_k
from lmdecode.beam.rule_arguments import RuleArguments
from lmdecode.beam.state import BeamStep
from lmdecode.beam.token_rules import TokenRules, join_token_rules
from lmdecode.beam.types import UNUSED_BEAM_SCORE, BeamCandidates

__all__ = ["PassChooser"]


class PassChooser:
    """As ``Chooser``, by ``log_softmax_top_k``, ``beam_step`` and gathers, a pass a group."""

    def __init__(self, plan: BeamPlan, store: BeamSlots, vocab_size: int) -> None:
        rules, passes = rules_of_plan(plan, vocab_size), _passes(plan)
        self._passes = [
            _Pass([plan.entries[i] for i in part], [rules[i] for i in part], store,
                  first=part.start, whole=len(passes) == 1)
            for part in passes
        ]  # fmt: skip
        self._store, self._num_next_rows = store, plan.num_next_rows
        self._slots = store.integers([entry.slot for entry in plan.entries])

    def choose(
        self, logits: Tensor, token_bitmask: Tensor | None, bonus: Tensor | None, traces: bool
    ) -> StepChoice:
        """Choose the next beams."""
        # Where there are several passes, they put their rows together; one place more is "none".
        several = len(self._passes) > 1
        count = self._num_next_rows
        tokens = self._store.integers([-1] * (count + 1) if several else [])
        parents = tokens[:count].clone()
        traced = []
        for layout in self._passes:
            candidates = layout.candidates(logits, tokens, token_bitmask)
            step = layout.advance(candidates, bonus)
            if layout.next_rows is None:
                tokens, parents = step.tokens, step.parents
            else:
                tokens[layout.next_rows] = step.tokens
                parents[layout.next_rows] = step.parents
            if traces:
                traced += [
                    (BeamCandidates(*(tensor[i] for tensor in candidates)), step.decisions[i])
                    for i in range(len(step.decisions))
                ]
        state = self._store.state
        # The one place where the host waits.
        ended = torch.where(state.status > 0, 2, state.done).index_select(0, self._slots)
        return StepChoice(tokens[:count], parents, ended.tolist(), traced)


class _Pass:
    """At most one group of a request: R searches, their W rows of the logits, N next beams."""

    def __init__(
        self,
        entries: Sequence[PlannedSearch],
        rules: Sequence[TokenRules],
        store: BeamSlots,
        *,
        first: int,
        whole: bool,
    ) -> None:
        ints = store.integers
        requests = [entry.search.request for entry in entries]
        widths = [entry.num_rows for entry in entries]
        sizes = [entry.size for entry in entries]
        parents = [entry.first_row for entry in entries]
        slots = [entry.slot for entry in entries]
        is_first = [entry.search.steps == 0 for entry in entries]
        self._store, self._entries = store, entries
        self._bonus = slice(first, first + len(entries))
        self._rules, self._trie = requests[0].dialect, requests[0].trie
        self._arguments = RuleArguments(join_token_rules(rules), store.device)
        self._num_candidates = max(request.num_candidates for request in requests)
        self._widest = max(sizes)
        self._num_next_rows = sum(sizes)
        # [W] of the logits; None: all, in order
        self._rows = None if whole else ints(_ranges(parents, widths))
        self._widths = widths[0] if len(set(widths)) == 1 else ints(widths)  # [R]
        self._slots = ints(slots)  # [R]
        # [W] slot * beams + beam, in the state
        self._beams = ints(_ranges([slot * store.num_beams for slot in slots], widths))
        self._row_offsets = ints(starts_of(sizes))  # [R + 1] of the next beams, within the pass
        self._parent_offsets = ints(parents)  # [R]
        # [N] rows of the logits that parents are held to: a beam that exists only in name, or a
        # group that is done, may name a row that it has not. None: they are always within.
        self._parent_bounds = None
        if any(is_first) or self._rules == "scorer":
            last = [row + width - 1 for row, width in zip(parents, widths, strict=True)]
            self._parent_bounds = ints(_each(parents, sizes)), ints(_each(last, sizes))
        # [N] places among all next rows; None: all, in order
        next_rows = [entry.next_row for entry in entries]
        self.next_rows = None if whole else ints(_ranges(next_rows, sizes))
        # [R] beams that a search of one row is to have, 0: it has all its rows; None: all have
        self._first_widths = None
        if any(is_first):
            self._first_widths = ints(
                [size if first else 0 for size, first in zip(sizes, is_first, strict=True)]
            )
        # [R, D] places among all next rows of what earlier groups chose, -1: none
        self._diversity = None
        group = entries[0].group
        if group:
            most = max(group * size for size in sizes)
            self._diversity = ints(
                [
                    [*range(row - group * size, row), *[-1] * (most - group * size)]
                    for row, size in zip(next_rows, sizes, strict=True)
                ]
            )
        if self._trie is not None:
            # [N] slot * beams + beam of the next beams, and what takes the row of the logits that
            # is a parent to a row of the pass
            self._next_beams = ints(_ranges([slot * store.num_beams for slot in slots], sizes))
            starts = starts_of(widths)
            shifts = [start - row for start, row in zip(starts, parents, strict=False)]
            self._shift = ints(_each(shifts, sizes))

    def candidates(
        self, logits: Tensor, tokens: Tensor, token_bitmask: Tensor | None
    ) -> BeamCandidates:
        """Return the candidates; tokens: all next rows', as far as they are chosen."""
        state, rules = self._store.state, self._arguments
        lengths = sequences = None
        if rules.needs_lengths:
            lengths = state.lengths.index_select(0, self._slots)
        if rules.looks_back:
            longest = max(len(e.search.request.prompt_ids) + e.search.steps for e in self._entries)
            flat = state.sequences.flatten(0, 1)[:, :longest]
            sequences = flat.index_select(0, self._beams)
        diversity = None if self._diversity is None else tokens[self._diversity]
        processors: dict[str, Any] = rules.of_step(lengths, sequences, diversity)
        if self._rows is not None:
            logits = logits.index_select(0, self._rows)
        if token_bitmask is not None:
            processors["token_bitmask"] = (
                token_bitmask if self._rows is None else token_bitmask.index_select(0, self._rows)
            )
        if self._trie is not None:
            processors["trie"] = self._trie
            processors["nodes"] = self._store.nodes.view(-1).index_select(0, self._beams)
        candidates = log_softmax_top_k(
            logits,
            state.scores.view(-1).index_select(0, self._beams),
            self._num_candidates,
            num_beams=self._widths,
            **processors,
        )
        # A trie does without the beams that a search does not have yet.
        if self._first_widths is not None and self._trie is None:
            candidates = all_beams(candidates, self._first_widths, self._widest)
        return candidates

    def advance(self, candidates: BeamCandidates, bonus: Tensor | None) -> BeamStep:
        """Decide about the candidates; the parents are rows of the logits."""
        step = beam_step(
            self._store.state,
            self._store.parameters,
            candidates.scores,
            candidates.tokens,
            candidates.beams,
            log_probs=candidates.log_probs,
            status=candidates.status,
            slots=self._slots,
            row_offsets=self._row_offsets,
            parent_offsets=self._parent_offsets,
            bonus=None if bonus is None else bonus[self._bonus],
            rows=self._num_next_rows,
            dialect=self._rules,
        )
        if self._parent_bounds is not None:
            low, high = self._parent_bounds
            step = step._replace(parents=step.parents.clamp(low, high))
        if self._trie is not None:
            rows = self._beams.index_select(0, step.parents + self._shift)
            nodes = self._store.nodes.view(-1)
            nodes[self._next_beams] = self._trie.step(nodes.index_select(0, rows), step.tokens)
        return step


def _passes(plan: BeamPlan) -> list[range]:
    kinds = [(e.group, e.search.request.dialect, id(e.search.request.trie)) for e in plan.entries]
    starts = [0]
    for _, same in itertools.groupby(kinds):
        starts.append(starts[-1] + len(list(same)))
    return [range(*pair) for pair in itertools.pairwise(starts)]


def _each(values: Sequence[int], counts: Sequence[int]) -> list[int]:
    return [v for v, count in zip(values, counts, strict=True) for _ in range(count)]


def _ranges(starts: Sequence[int], counts: Sequence[int]) -> list[int]:
    return [s + i for s, count in zip(starts, counts, strict=True) for i in range(count)]


def all_beams(candidates: BeamCandidates, widths: Tensor, widest: int) -> BeamCandidates:
    """Add candidates [R, K] for the beams, up to widths [R], that searches of one row lack."""
    if widest == 1:
        return candidates
    scores, tokens, beams, status, log_probs = candidates
    requests, count = scores.shape
    alive = scores > -torch.inf
    # Candidates of equal score stand in the order of their tokens.
    order = tokens.masked_fill(~alive, torch.iinfo(torch.int64).max).argsort(dim=1)
    shape = (requests, widest - 1, count)
    beam = torch.arange(1, widest, device=scores.device)[None, :, None]
    other_scores = (log_probs.gather(1, order) + UNUSED_BEAM_SCORE)[:, None].expand(shape)
    other_scores = other_scores.masked_fill(beam >= widths[:, None, None], -torch.inf).flatten(1)
    best, places = other_scores.sort(dim=1, descending=True, stable=True)
    have = alive.sum(dim=1, keepdim=True)
    rank = torch.arange(count, device=scores.device)[None]
    behind = (rank - have).clamp(0, best.shape[1] - 1)
    place = places.gather(1, behind)
    best = best.gather(1, behind)
    source = order.gather(1, place % count)
    missing = (rank >= have) & (best > -torch.inf)
    return BeamCandidates(
        torch.where(missing, best, scores),
        torch.where(missing, tokens.gather(1, source), tokens),
        torch.where(missing, place // count + 1, beams),
        status,
        torch.where(missing, log_probs.gather(1, source), log_probs),
    )
