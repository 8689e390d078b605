"""Memory and CUDA graph of searches of one shape on a device, kept for reuse."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._ops import ops
from lmdecode.beam.search_arguments import SearchOfStep, rules_of_step, searches_of_step
from lmdecode.beam.state import SEARCH_DIALECTS, BeamParameters, BeamState, SearchDialect
from lmdecode.decoder.device_decoder import DeviceDecoder
from lmdecode.decoder.device_forward import DeviceForward

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
    rules: SearchDialect
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
        As ``rules_of_step`` returns them, of all slots, on the CPU.
    key
        Equal for all searches that it can be filled with.
    """

    def __init__(
        self,
        decoder: DeviceDecoder,
        sizes: PlanSizes,
        state: BeamState,
        parameters: BeamParameters,
        rules: list[Tensor],
        key: Hashable,
    ) -> None:
        self.key = key
        device = decoder.device
        slots, beams, capacity = sizes.sequences
        self._decoder, self._sizes, self._rows = decoder, sizes, slots * beams
        self._parameters = BeamParameters(*(t.to(device, copy=True) for t in parameters))
        self._rules = [tensor.to(device, copy=True) for tensor in rules]
        self.state = BeamState(*(tensor.to(device, copy=True) for tensor in state))
        requests = slots // sizes.num_groups
        self.forward = DeviceForward(decoder, self._rows, requests, capacity, sizes.source)
        searches, self._passes = searches_of_step(_searches(sizes))
        self._searches = torch.tensor(searches, dtype=torch.int64, device=device)
        self._nodes = torch.zeros(slots, beams, dtype=torch.int32, device=device)  # of no trie
        self._graph: torch.cuda.CUDAGraph | None = None

    def fill(self, state: BeamState, parameters: BeamParameters, rules: list[Tensor]) -> None:
        """Begin with other searches, of the same shapes and with the same rules switched on."""
        for kept, new in (
            (self.state, state), (self._parameters, parameters), (self._rules, rules)
        ):  # fmt: skip
            for tensor, values in zip(kept, new, strict=True):
                tensor.copy_(values)
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

    def _step(self) -> None:
        forward, sizes = self.forward, self._sizes
        forward.run(to_logits=True)
        forward.positions.add_(1)
        tokens, parents, _ = ops.beam_search_step_(
            forward.logits,
            list(self.state),
            list(self._parameters),
            self._rules,
            self._searches,
            self._nodes,
            self._passes,
            1 if sizes.greedy else sizes.num_candidates,
            self._rows,
            None,  # token_bitmask
            None,  # bonus
            True,  # fills_missing
            sizes.greedy,
            [],  # trace
        )
        forward.tokens.copy_(tokens)
        ops.update_beam_indirection_(forward.table, parents, 0, forward.positions)


def _searches(sizes: PlanSizes) -> list[SearchOfStep]:
    """Return the searches of all slots, group after group; a row is a beam of a slot."""
    slots, beams, _ = sizes.sequences
    dialect = SEARCH_DIALECTS[sizes.rules]
    return [
        SearchOfStep(slot, slot, dialect, group, beams, slot * beams, beams, slot * beams)
        for group in range(sizes.num_groups)
        for slot in range(group, slots, sizes.num_groups)
    ]


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
    rules = rules_of_step(token_rules, "cpu")
    key = (sizes, _shapes(state), _shapes(parameters), _shapes(rules))
    plan: Plan | None = decoder.plans.take(key)
    if plan is not None:
        plan.fill(state, parameters, rules)
        return plan
    with torch.inference_mode(False):  # later searches may be outside of it
        return Plan(decoder, sizes, state, parameters, rules, key)


def _shapes(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
