"""Memory and CUDA graph of searches of one shape on a device, kept for reuse."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._ops import ops
from lmdecode.beam.ops import beam_step, log_softmax_top_k
from lmdecode.beam.rule_arguments import RuleArguments
from lmdecode.beam.state import BeamParameters, BeamState, BeamStep, Rules
from lmdecode.beam.types import MISSING_CANDIDATE_SCORE
from lmdecode.decoder.device_decoder import DeviceDecoder
from lmdecode.decoder.device_forward import DeviceForward
from lmdecode.decoder.device_greedy import greedy_candidates

if TYPE_CHECKING:
    from lmdecode.beam.token_rules import TokenRules

__all__ = ["Plan", "PlanSizes", "take_plan"]

_capturing = Lock()  # beginning to capture waits for the device, which ends another capture


class PlanSizes(NamedTuple):
    """Numbers that the steps of a search depend on.

    Attributes
    ----------
    sequences
        Slots, beams and capacity.
    source
        Positions of a memory, a multiple of 16.
    num_groups, num_candidates, rules, greedy
        As for ``DeviceSearches``.
    """

    sequences: tuple[int, ...]
    source: int
    num_groups: int
    num_candidates: int
    rules: Rules
    greedy: bool


class Plan:
    """Searches of one shape, with the same rules switched on; a step does the same each time.

    Parameters
    ----------
    decoder, sizes
        See there.
    state, parameters
        Of the first searches, on the CPU.
    rules
        Of each group's slots, on the CPU.
    key
        Equal for all searches that it can be filled with.
    """

    def __init__(
        self,
        decoder: DeviceDecoder,
        sizes: PlanSizes,
        state: BeamState,
        parameters: BeamParameters,
        rules: list[RuleArguments],
        key: Hashable,
    ) -> None:
        self.key = key
        device = decoder.device
        slots, beams, capacity = sizes.sequences
        self._decoder, self._sizes, self._beams = decoder, sizes, beams
        self._requests = requests = slots // sizes.num_groups
        self._parameters = BeamParameters(*(t.to(device, copy=True) for t in parameters))
        self._rules = [arguments.to(device) for arguments in rules]
        self._no_end = self._tokens_that_do_not_end(parameters).to(device)
        self.state = BeamState(*(tensor.to(device, copy=True) for tensor in state))
        self.forward = DeviceForward(decoder, slots * beams, requests, capacity, sizes.source)
        rows = torch.arange(slots * beams, device=device).view(requests, sizes.num_groups, beams)
        self._group_rows = [rows[:, group].flatten() for group in range(sizes.num_groups)]
        numbers = torch.arange(slots, device=device).view(requests, sizes.num_groups)
        self._group_slots = [numbers[:, group].contiguous() for group in range(sizes.num_groups)]
        self._parents = rows.flatten().clone()
        self._graph: torch.cuda.CUDAGraph | None = None

    def fill(
        self, state: BeamState, parameters: BeamParameters, rules: list[RuleArguments]
    ) -> None:
        """Begin with other searches, of the same shapes and with the same rules switched on."""
        for kept, new in ((self.state, state), (self._parameters, parameters)):
            for tensor, values in zip(kept, new, strict=True):
                tensor.copy_(values)
        for arguments, others in zip(self._rules, rules, strict=True):
            arguments.copy_(others)
        self._no_end.copy_(self._tokens_that_do_not_end(parameters))
        self.forward.clear()

    def read(self, position: int) -> None:
        """Have the model read the tokens at a position next, of all sequences."""
        self.forward.tokens.copy_(self.state.sequences[:, :, position].flatten())
        self.forward.positions.fill_(position)

    def step(self) -> None:
        """Add a token to every sequence: by the graph, where there is one.

        The tokens before it have been read, but for the last ones, which ``read`` has set or the
        step before this.
        """
        if self._graph is not None:
            self._graph.replay()
            return
        self._step()
        if self._decoder.use_cuda_graph:
            # This step has set cuBLAS and the kernels up; capturing runs nothing.
            self._graph = self._captured()

    def has_ended(self) -> bool:
        """Whether all searches have; waits for the device."""
        return bool(((self.state.done != 0) | (self.state.status != 0)).all())

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        device = self._decoder.device
        if device.type != "cuda":
            return None
        graph = torch.cuda.CUDAGraph()
        # torch's own stream for captures is that of whichever device came first.
        with _capturing, torch.cuda.device(device):
            stream = torch.cuda.Stream(device)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._step()
        return graph

    def _tokens_that_do_not_end(self, parameters: BeamParameters) -> Tensor:
        """[requests, groups]: for candidates that there are none of."""
        last = self._decoder.config.vocab_size - 1
        tokens = [
            next((t for t in range(last) if t not in row), last)
            for row in parameters.end_tokens.tolist()
        ]
        return torch.tensor(tokens, dtype=torch.int64).view(self._requests, self._sizes.num_groups)

    def _step(self) -> None:
        forward, num_groups = self.forward, self._sizes.num_groups
        forward.run(to_logits=True)
        forward.positions.add_(1)
        if num_groups == 1:
            step = self._choose(0, self.state.lengths, [])
            forward.tokens.copy_(step.tokens)
            parents = step.parents
        else:
            lengths = self.state.lengths.clone()  # the step makes them longer
            tokens = forward.tokens.view(-1, num_groups, self._beams)
            all_parents = self._parents.view_as(tokens)
            chosen: list[Tensor] = []
            for group, rows in enumerate(self._group_rows):
                step = self._choose(group, lengths, chosen)
                chosen.append(step.tokens.view(-1, self._beams))
                tokens[:, group] = chosen[-1]
                all_parents[:, group] = rows[step.parents].view(-1, self._beams)
            parents = self._parents
        ops.update_beam_indirection_(forward.table, parents, 0, forward.positions)

    def _choose(self, group: int, lengths: Tensor, chosen: list[Tensor]) -> BeamStep:
        """Choose the next tokens of a group; chosen: those of earlier ones, [requests, beams]."""
        rows, slots, state = self._group_rows[group], self._group_slots[group], self.state
        is_whole = self._sizes.num_groups == 1
        logits, sequences = self.forward.logits, state.sequences.flatten(0, 1)
        scores = state.scores.flatten()
        if not is_whole:
            logits, sequences, scores = logits[rows], sequences[rows], scores[rows]
            lengths = lengths[slots]
        rules, earlier = self._rules[group], torch.cat(chosen, dim=1) if chosen else None
        processors = rules.of_step(lengths, sequences, earlier)
        if self._sizes.greedy:
            candidates = greedy_candidates(
                logits, scores, ngram_sizes=rules.ngram_sizes, **processors
            )
        else:
            candidates = log_softmax_top_k(
                logits,
                scores,
                self._sizes.num_candidates,
                num_beams=self._beams,
                **processors,
            )
        best, tokens = candidates.scores, candidates.tokens
        if self._sizes.rules == "scorer":
            missing = best == -torch.inf
            best = best.masked_fill(missing, MISSING_CANDIDATE_SCORE)
            tokens = torch.where(missing, self._no_end[:, group, None], tokens)
        return beam_step(
            state, self._parameters, best, tokens, candidates.beams, log_probs=candidates.log_probs,
            status=candidates.status, slots=None if is_whole else slots, dialect=self._sizes.rules,
        )  # fmt: skip


def take_plan(
    decoder: DeviceDecoder,
    sizes: PlanSizes,
    state: BeamState,
    parameters: BeamParameters,
    token_rules: TokenRules,
) -> Plan:
    """Return a plan that is filled with these searches, whose tensors are on the CPU.

    It is one that an earlier search has given back to ``decoder.plans``, or a new one.
    """
    slots = torch.arange(sizes.sequences[0]).view(-1, sizes.num_groups)
    rules = [
        RuleArguments(token_rules.of_slots(slots[:, group])) for group in range(sizes.num_groups)
    ]
    key = (sizes, _shapes(state), _shapes(parameters), *(one.signature for one in rules))
    plan: Plan | None = decoder.plans.take(key)
    if plan is not None:
        plan.fill(state, parameters, rules)
        return plan
    with torch.inference_mode(False):  # later searches may be outside of it
        return Plan(decoder, sizes, state, parameters, rules, key)


def _shapes(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
