"""The loop of ``Decoding`` on a device: cuBLAS for products, our kernels for the rest.

A step waits for nothing: positions and lengths lie in tensors on the device, so one CUDA graph
replays for every step, and whether all searches have ended is asked for now and then. On the CPU
the same loop runs with the ops' plain torch, which is how it is tested.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._ops import ops
from lmdecode.beam.search_arguments import SearchOfStep, rules_of_step, searches_of_step
from lmdecode.beam.state import SEARCH_DIALECTS, BeamParameters, BeamState, SearchDialect
from lmdecode.beam.token_rules import TokenRules
from lmdecode.decoder.device_decoder import DeviceDecoder, DeviceForward
from lmdecode.decoder.state import padded

__all__ = ["DeviceDecoder", "DeviceSearches"]


if TYPE_CHECKING:
    from lmdecode.beam.token_rules import TokenRules

__all__ = ["Plan", "PlanSizes", "take_plan"]

_capturing = Lock()  # beginning to capture waits for the device, which ends another capture


class PlanSizes(NamedTuple):
    """Numbers that the steps of a search depend on.

    ``sequences`` has slots, beams and capacity; ``source`` is the positions of a memory, a multiple
    of 16. The other fields are arguments of ``DeviceSearches``.
    """

    sequences: tuple[int, ...]
    source: int
    num_groups: int
    num_candidates: int
    dialect: SearchDialect
    greedy: bool


class Plan:
    """Searches of one shape, with the same rules switched on; a step does the same each time.

    ``state``, ``parameters`` and ``rules`` (from ``rules_of_step``, for all slots) are those of the
    first searches, on the CPU. ``key`` is equal for all searches that the plan can run.
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
        """Add a token to every sequence, by the graph if there is one.

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
    dialect = SEARCH_DIALECTS[sizes.dialect]
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
    """Return a plan that is filled with these searches; their tensors are on the CPU.

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


_POLL_STEPS = 8  # between two looks at whether all searches have ended


class DeviceSearches:
    """Searches of a decoder on its device, all with sequences of one length.

    The arguments are those of ``lmdecode.decoder.searches.DecodingSearches``, copied from the CPU.
    After ``run``, ``state`` and ``parameters`` are on the CPU again. Raises ValueError for
    sequences of different lengths or longer than the model's positions, and for tokens out of the
    vocabulary.
    """

    def __init__(
        self,
        decoder: DeviceDecoder,
        state: BeamState,
        parameters: BeamParameters,
        token_rules: TokenRules,
        source: int,
        *,
        num_groups: int = 1,
        num_candidates: int,
        dialect: SearchDialect = "generate",
        greedy: bool = False,
    ) -> None:
        self.decoder, self.state, self.parameters = decoder, state, parameters
        self._length, self._limit = self._check(state, parameters)
        sizes = PlanSizes(
            tuple(state.sequences.shape),
            padded(source),
            num_groups,
            num_candidates,
            dialect,
            greedy,
        )
        self._plan = take_plan(decoder, sizes, state, parameters, token_rules)

    def _check(self, state: BeamState, parameters: BeamParameters) -> tuple[int, int]:
        """Return the length of the sequences and the longest that they may become."""
        capacity = state.sequences.shape[2]
        longest = parameters.max_lengths.clamp(max=capacity)
        longest = longest.where(longest > 0, torch.full_like(longest, capacity))
        length, limit = int(state.lengths[0]), int(longest[0])
        if bool((state.lengths != length).any()) or bool((longest != limit).any()) or length < 1:
            raise ValueError(
                f"Decoding: state.lengths is {state.lengths.tolist()} and parameters.max_lengths "
                f"{parameters.max_lengths.tolist()}; expected one length for all on a device"
            )
        for most, name in (
            (self.decoder.num_positions, "positions"),
            (self.decoder.num_distances, "distances of the relative bias"),
        ):
            if most is not None and limit > most + 1:
                raise ValueError(
                    f"Decoding: parameters.max_lengths is {limit}; expected at most {most + 1}: "
                    f"the model has {most} {name}"
                )
        tokens, vocab = state.sequences[..., :length], self.decoder.config.vocab_size
        if bool(((tokens < 0) | (tokens >= vocab)).any()):
            raise ValueError(
                f"Decoding: state.sequences has tokens from {int(tokens.min())} to "
                f"{int(tokens.max())}; expected 0 to {vocab - 1}"
            )
        return length, limit

    def read_memory(self, memory: Tensor, lengths: Tensor, requests: Tensor) -> None:
        """Compute the keys and values of the memories of all requests, in order.

        ``memory`` is [requests, source, memory_size]; ``lengths`` and ``requests``, [requests]
        int64, are the valid positions of each and the request that it belongs to.
        """
        self._plan.forward.read_memory(memory[requests], lengths[requests])

    @torch.no_grad()
    def run(self) -> int:
        """Do steps until all searches have ended; return how many, or a few more. Once."""
        plan = self._plan
        for position in range(self._length - 1):
            plan.read(position)
            plan.forward.run(to_logits=False)
        plan.read(self._length - 1)
        steps = 0
        for _ in range(self._limit - self._length):
            plan.step()
            steps += 1
            if steps % _POLL_STEPS == 0 and plan.has_ended():
                break
        self.state = BeamState(*(tensor.to("cpu", copy=True) for tensor in plan.state))
        del self._plan
        self.decoder.plans.give_back(plan.key, plan)
        return steps
