"""The loop of ``Decoding`` on a device: cuBLAS for products, our kernels for the rest.

A step waits for nothing: positions and lengths lie in tensors on the device, so one CUDA graph
replays for every step, and whether all searches have ended is asked for now and then. On the CPU
the same loop runs with the ops' plain torch, which is how it is tested.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode._checks import check_format
from lmdecode.beam.state import BeamParameters, BeamState, Rules
from lmdecode.beam.token_rules import TokenRules
from lmdecode.decoder.checks import check_weights
from lmdecode.decoder.config import DecoderConfig, DecoderWeights, LayerWeights
from lmdecode.decoder.device_plan import Plans, PlanSizes
from lmdecode.decoder.state import padded

__all__ = ["DeviceDecoder", "DeviceSearches"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_POLL_STEPS = 8  # between two looks at whether all searches have ended


class DeviceDecoder:
    """A decoder's weights on a device.

    Parameters
    ----------
    config, weights
        See there.
    weight_format : {"float32", "float16", "bfloat16"}
        What products and caches are of; norms, softmax and the residual stream are float32.
    device
        Of the weights by default.
    use_cuda_graph : bool
        Whether a step is captured, once for searches of the same shape, and replayed.

    Raises
    ------
    ValueError, TypeError
        Names what has a wrong shape, dtype or type, or another format.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        weight_format: str | torch.dtype = "float32",
        *,
        device: torch.device | None = None,
        use_cuda_graph: bool = False,
    ) -> None:
        weight_format = check_format("Decoding", weight_format, DTYPES, " on a device")
        check_weights(config, weights)
        self.config, self.weight_format = config, weight_format
        self.dtype, self.use_cuda_graph = DTYPES[weight_format], use_cuda_graph
        self.device = weights.embedding.device if device is None else device
        # Added to the residual stream, where the norms are.
        wide = ("self_out_bias", "cross_out_bias", "ffn_down_bias")

        def put(name: str, tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            is_wide = name in wide or "norm" in name or name in ("positions", "relative_bias")
            dtype = torch.float32 if is_wide else self.dtype
            return tensor.detach().to(device=self.device, dtype=dtype).contiguous()

        def put_layer(layer: LayerWeights) -> LayerWeights:
            moved = {name: put(name, tensor) for name, tensor in layer._asdict().items()}
            for name in ("self_norm_gamma", "cross_norm_gamma", "ffn_norm_gamma"):
                if moved[name] is None:  # layers have all of their norms
                    moved[name] = torch.ones(config.model_size, device=self.device)
            return LayerWeights(**moved)  # type: ignore[arg-type]

        top = {
            name: put(name, tensor)
            for name, tensor in weights._asdict().items()
            if name != "layers"
        }
        self.weights = DecoderWeights(**top, layers=tuple(map(put_layer, weights.layers)))  # type: ignore[arg-type]
        self.num_positions: int | None = None
        if weights.positions is not None:
            self.num_positions = weights.positions.shape[0] - config.position_offset
        self.num_distances: int | None = None
        if weights.relative_bias is not None:
            self.num_distances = weights.relative_bias.shape[1]
        self.plans = Plans()


class DeviceSearches:
    """Searches of a decoder on its device, all with sequences of one length.

    Parameters
    ----------
    decoder, state, parameters, token_rules, source
        As for ``lmdecode.decoder.searches.DecodingSearches``; on the CPU, copied from there.
    num_groups, num_candidates, rules, greedy
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
        rules: Rules = "generate",
        greedy: bool = False,
    ) -> None:
        self.decoder, self.state, self.parameters = decoder, state, parameters
        self._length, self._limit = self._check(state, parameters)
        sizes = PlanSizes(
            tuple(state.sequences.shape), padded(source), num_groups, num_candidates, rules, greedy
        )
        self._plan = decoder.plans.take(decoder, sizes, state, parameters, token_rules)

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
        plan, sequences = self._plan, self._plan.state.sequences
        for position in range(self._length - 1):
            plan.forward.positions.fill_(position)
            plan.forward.tokens.copy_(sequences[:, :, position].flatten())
            plan.forward.run(to_logits=False)
        steps = 0
        for _ in range(self._limit - self._length):
            plan.step()
            steps += 1
            if steps % _POLL_STEPS == 0 and plan.has_ended():
                break
        self.state = BeamState(*(tensor.to("cpu", copy=True) for tensor in plan.state))
        del self._plan
        self.decoder.plans.give_back(plan)
        return steps
