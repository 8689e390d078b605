"""The loop of ``Decoding`` on a device: cuBLAS for products, our kernels for the rest.

A step waits for nothing: positions and lengths lie in tensors on the device, so one CUDA graph
replays for every step, and whether all searches have ended is asked for now and then. On the CPU
the same loop runs with the ops' plain torch, which is how it is tested.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode.beam.state import BeamParameters, BeamState, SearchDialect
from lmdecode.beam.token_rules import TokenRules
from lmdecode.decoder.device_decoder import DeviceDecoder
from lmdecode.decoder.device_plan import PlanSizes, take_plan
from lmdecode.decoder.state import padded

__all__ = ["DeviceDecoder", "DeviceSearches"]

_POLL_STEPS = 8  # between two looks at whether all searches have ended


class DeviceSearches:
    """Searches of a decoder on its device, all with sequences of one length.

    Parameters
    ----------
    decoder, state, parameters, token_rules, source
        As for ``lmdecode.decoder.searches.DecodingSearches``; on the CPU, copied from there.
    num_groups, num_candidates, dialect, greedy
        Likewise.

    Attributes
    ----------
    state, parameters
        After ``run`` on the CPU again.

    Raises
    ------
    ValueError
        Sequences of different lengths, or longer than the model has positions; tokens that the
        vocabulary does not have.
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

        Parameters
        ----------
        memory, lengths, requests : Tensor
            [requests, source, memory_size], and [requests] int64 twice: how much of each counts,
            and whose it is.
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
