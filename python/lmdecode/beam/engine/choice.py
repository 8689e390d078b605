"""A step of ``BeamSearch`` on the device of its state, and what it was chosen from."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lmdecode._ops import ops
from lmdecode.beam.engine.plan import BeamPlan
from lmdecode.beam.engine.request_rules import token_rules_of_request
from lmdecode.beam.engine.slots import BeamSlots
from lmdecode.beam.state import RULES
from lmdecode.beam.token_rules import TokenRules, join_token_rules
from lmdecode.beam.trie import tensors_of_tries
from lmdecode.beam.types import BeamCandidates

__all__ = ["Choice", "Chooser", "CpuChooser", "rules_of_plan"]


class Choice(NamedTuple):
    """The next beams of a step.

    Attributes
    ----------
    tokens, parents : Tensor
        [next rows] int64.
    ended : list of int
        Of each search of the plan: 0 it goes on, 1 done, 2 failed.
    traced : list of (BeamCandidates, Tensor)
        Of each search of the plan, if asked for: its candidates and decisions, a row.
    """

    tokens: Tensor
    parents: Tensor
    ended: list[int]
    traced: list[tuple[BeamCandidates, Tensor]]


class Chooser(Protocol):
    """Chooses by a plan, as often as the plan holds."""

    def choose(
        self, logits: Tensor, token_bitmask: Tensor | None, bonus: Tensor | None, traces: bool
    ) -> Choice:
        """Choose the next beams from [rows, V] logits; bonus: [searches, beams of the state]."""


def rules_of_plan(plan: BeamPlan, vocab_size: int) -> list[TokenRules]:
    """Return the rules of each search of a plan; those of a request are made once."""
    rules = []
    for entry in plan.entries:
        search = entry.search
        if search.token_rules is None:
            search.token_rules = token_rules_of_request(search.request, vocab_size)
        rules.append(search.token_rules)
    return rules


class CpuChooser:
    """By one op, ``beam_search_step_``."""

    def __init__(self, plan: BeamPlan, store: BeamSlots, vocab_size: int) -> None:
        self._numbers = store.integers(
            [
                [
                    entry.slot,
                    number,
                    entry.group,
                    RULES[entry.search.request.rules],
                    entry.first_row,
                    entry.num_rows,
                    entry.next_row,
                    entry.group * entry.size,
                ]
                for number, entry in enumerate(plan.entries)
            ]
        )
        rules = join_token_rules(rules_of_plan(plan, vocab_size))
        tries = tensors_of_tries([entry.search.request.trie for entry in plan.entries])
        self._rules = [*rules, *tries]
        self._count = max(entry.search.request.num_candidates for entry in plan.entries)
        self._state, self._parameters = list(store.state), list(store.parameters)
        self._nodes, self._num_next_rows = store.nodes, plan.num_next_rows

    def choose(
        self, logits: Tensor, token_bitmask: Tensor | None, bonus: Tensor | None, traces: bool
    ) -> Choice:
        """Choose the next beams."""
        trace = self._new_trace() if traces else []
        tokens, parents, ended = ops.beam_search_step_(
            logits,
            self._state,
            self._parameters,
            self._rules,
            self._numbers,
            self._nodes,
            self._count,
            self._num_next_rows,
            token_bitmask,
            bonus,
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
        return Choice(tokens, parents, ended.tolist(), traced)

    def _new_trace(self) -> list[Tensor]:
        shape = (len(self._numbers), self._count)
        dtypes = (torch.float32, torch.float32, torch.int64, torch.int64, torch.int32)
        return [
            *(torch.empty(shape, dtype=dtype, device="cpu") for dtype in dtypes),
            torch.empty(shape[0], dtype=torch.uint8, device="cpu"),
        ]
