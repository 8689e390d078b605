"""A step of ``BeamSearch``, and what it was chosen from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode._ops import ops
from lmdecode.beam.engine.plan import BeamPlan
from lmdecode.beam.engine.request_rules import token_rules_of_request
from lmdecode.beam.engine.slots import BeamSlots
from lmdecode.beam.search_arguments import rules_of_step, searches_of_step
from lmdecode.beam.token_rules import TokenRules, join_token_rules
from lmdecode.beam.types import BeamCandidates

__all__ = ["Choice", "Chooser", "rules_of_plan"]


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


class Chooser:
    """Chooses by a plan, as often as the plan holds: by one op, on any device.

    Parameters
    ----------
    plan, store
        The arguments of the op are on the device of the store.
    vocab_size
        Of the logits.
    """

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
    ) -> Choice:
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
        return Choice(tokens, parents, ended.tolist(), traced)

    def _new_trace(self) -> list[Tensor]:
        shape, device = (len(self._searches), self._count), self._searches.device
        dtypes = (torch.float32, torch.float32, torch.int64, torch.int64, torch.int32)
        return [
            *(torch.empty(shape, dtype=dtype, device=device) for dtype in dtypes),
            torch.empty(shape[0], dtype=torch.uint8, device=device),
        ]


def rules_of_plan(plan: BeamPlan, vocab_size: int) -> list[TokenRules]:
    """Return the rules of each search of a plan; those of a request are made once."""
    rules = []
    for entry in plan.entries:
        search = entry.search
        if search.token_rules is None:
            search.token_rules = token_rules_of_request(search.request, vocab_size)
        rules.append(search.token_rules)
    return rules
