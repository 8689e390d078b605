"""The loop of ``Decoding`` on a device: cuBLAS for products, our kernels for the rest.

A step waits for nothing: positions and lengths lie in tensors on the device, so one CUDA graph
replays for every step, and whether all searches have ended is asked for now and then. On the CPU
the same loop runs with the ops' plain torch, which is how it is tested.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode._checks import check_format
from lmdecode._ops import ops
from lmdecode.beam.ops import beam_step, log_softmax_top_k
from lmdecode.beam.rule_arguments import RuleArguments
from lmdecode.beam.state import BeamParameters, BeamState, Rules
from lmdecode.beam.token_rules import TokenRules
from lmdecode.beam.types import MISSING_CANDIDATE_SCORE
from lmdecode.decoder.checks import check_weights
from lmdecode.decoder.config import (
    ACTIVATIONS,
    DecoderConfig,
    DecoderWeights,
    LayerWeights,
    bias_of_layer,
)
from lmdecode.decoder.device_greedy import greedy_candidates
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
        Whether a search captures its step, and replays it.

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


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class _Forward:
    """The model on the rows of a step, and its caches and scratch, set aside once."""

    def __init__(
        self, decoder: DeviceDecoder, rows: int, requests: int, capacity: int, source: int
    ) -> None:
        config, device = decoder.config, decoder.device
        self.decoder, self.source = decoder, padded(source)
        head, heads, layers = padded(config.head_size), config.num_heads, config.num_layers

        def new(*shape: int, dtype: torch.dtype = decoder.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.self_keys = new(layers, rows, heads, capacity, head)
        self.self_values = new(layers, rows, heads, capacity, head)
        self.cross_keys = new(layers, requests, heads, head, self.source)
        self.cross_values = new(layers, requests, heads, self.source, head)
        self.memory_lengths = new(requests, dtype=torch.int64)
        own = torch.arange(rows, dtype=torch.int32, device=device)
        self.table = own[:, None].repeat(1, capacity)
        self.tokens = new(rows, dtype=torch.int64)
        self.positions = new(rows, dtype=torch.int32)
        self.x = new(rows, config.model_size, dtype=torch.float32)
        self.normed, self.delta = new(rows, config.model_size), new(rows, config.model_size)
        self.qkv = new(rows, 3 * config.attention_size)
        self.query = new(rows, config.attention_size)
        self.context = new(rows, config.attention_size)
        self.up = new(rows, config.ffn_size)
        self.gate = new(rows, config.ffn_size) if config.gated else None
        self.logits = new(rows, config.vocab_size)

    def read_memory(self, memory: Tensor, lengths: Tensor) -> None:
        config = self.decoder.config
        requests, length, size = memory.shape
        flat = memory.to(device=self.decoder.device, dtype=self.decoder.dtype).reshape(-1, size)
        shape = (requests, length, 2, config.num_heads, config.head_size)
        out = flat.new_empty(len(flat), 2 * config.attention_size)
        for layer, keys, values in zip(
            self.decoder.weights.layers, self.cross_keys, self.cross_values, strict=True
        ):
            _linear(layer.cross_key_value, layer.cross_key_value_bias, flat, out)
            ops.decoder_cross_cache_(out.view(shape), keys, values)
        self.memory_lengths.copy_(lengths)

    def _add_norm(
        self, delta: Tensor | None, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None
    ) -> None:
        config = self.decoder.config
        ops.decoder_add_norm_(
            self.x, delta, bias, gamma, beta, config.norm_epsilon, config.norm == "rms_norm",
            config.norm_first, out=self.normed,
        )  # fmt: skip

    def run(self, *, to_logits: bool) -> None:
        """Read ``tokens`` at ``positions``; keys, values and, where wanted, logits are written."""
        config, weights = self.decoder.config, self.decoder.weights
        heads, head_size = config.num_heads, config.head_size
        scale, epsilon = config.attention_scale, config.denominator_epsilon
        ops.decoder_embed(
            self.tokens, self.positions, weights.embedding, weights.positions,
            config.embedding_scale, config.position_offset, x=self.x,
        )  # fmt: skip
        if weights.embedding_norm_gamma is not None:
            ops.decoder_add_norm_(
                self.x, None, None, weights.embedding_norm_gamma, weights.embedding_norm_beta,
                config.norm_epsilon, config.norm == "rms_norm", False, out=self.normed,
            )  # fmt: skip
        # What a sublayer reads: with norm_first its own norm, which the sublayer before it, or
        # this, fuses with its residual.
        first = weights.layers[0]
        if config.norm_first:
            self._add_norm(None, None, first.self_norm_gamma, first.self_norm_beta)
        elif weights.embedding_norm_gamma is None:
            self._add_norm(None, None, None, None)
        context = self.context.view(-1, heads, head_size)
        for number, layer in enumerate(weights.layers):
            is_last = number + 1 == len(weights.layers)
            _linear(layer.qkv, layer.qkv_bias, self.normed, self.qkv)
            ops.decoder_self_attention_(
                self.qkv.view(-1, 3, heads, head_size), self.self_keys[number],
                self.self_values[number], self.table, self.positions,
                bias_of_layer(config, weights.relative_bias, number), scale, epsilon, out=context,
            )  # fmt: skip
            torch.mm(self.context, layer.self_out.t(), out=self.delta)
            norm = (layer.self_norm_gamma, layer.self_norm_beta)
            if config.norm_first:
                norm = (layer.cross_norm_gamma, layer.cross_norm_beta)
            self._add_norm(self.delta, layer.self_out_bias, *norm)
            _linear(layer.cross_query, layer.cross_query_bias, self.normed, self.query)
            ops.decoder_cross_attention(
                self.query.view(-1, heads, head_size), self.cross_keys[number],
                self.cross_values[number], self.memory_lengths, scale, epsilon, out=context,
            )  # fmt: skip
            torch.mm(self.context, layer.cross_out.t(), out=self.delta)
            norm = (layer.cross_norm_gamma, layer.cross_norm_beta)
            if config.norm_first:
                norm = (layer.ffn_norm_gamma, layer.ffn_norm_beta)
            self._add_norm(self.delta, layer.cross_out_bias, *norm)
            _linear(layer.ffn_up, layer.ffn_up_bias, self.normed, self.up)
            if layer.ffn_gate is not None and self.gate is not None:
                _linear(layer.ffn_gate, layer.ffn_gate_bias, self.normed, self.gate)
            ops.decoder_activate_(self.up, self.gate, ACTIVATIONS[config.activation])
            torch.mm(self.up, layer.ffn_down.t(), out=self.delta)
            norm = (layer.ffn_norm_gamma, layer.ffn_norm_beta)
            if config.norm_first and is_last:
                norm = (weights.final_norm_gamma, weights.final_norm_beta)
            elif config.norm_first:
                following = weights.layers[number + 1]
                norm = (following.self_norm_gamma, following.self_norm_beta)
            self._add_norm(self.delta, layer.ffn_down_bias, *norm)
        if not to_logits:
            return
        if not config.norm_first and weights.final_norm_gamma is not None:
            self._add_norm(None, None, weights.final_norm_gamma, weights.final_norm_beta)
        _linear(weights.logits, weights.logits_bias, self.normed, self.logits)


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
        slots, beams, capacity = state.sequences.shape
        self.decoder, self.state, self.parameters = decoder, state, parameters
        self._rules_name, self._greedy, self._num_groups = rules, greedy, num_groups
        self._num_candidates, self._beams = num_candidates, beams
        self._requests = requests = slots // num_groups
        self._length, self._limit = self._check(state, parameters)
        device = decoder.device
        self._state = BeamState(*(tensor.to(device, copy=True) for tensor in state))
        self._parameters = BeamParameters(*(tensor.to(device) for tensor in parameters))
        self._forward = _Forward(decoder, slots * beams, requests, capacity, source)
        rows = torch.arange(slots * beams, device=device).view(requests, num_groups, beams)
        self._group_rows = [rows[:, group].flatten() for group in range(num_groups)]
        slot_numbers = torch.arange(slots, device=device).view(requests, num_groups)
        self._group_slots = [slot_numbers[:, group].contiguous() for group in range(num_groups)]
        self._rules = [
            RuleArguments(token_rules.of_slots(numbers.cpu()), device)
            for numbers in self._group_slots
        ]
        self._parents = rows.flatten().clone()
        ends = parameters.end_tokens.tolist()
        last = decoder.config.vocab_size - 1
        self._no_end = torch.tensor(
            [next((t for t in range(last) if t not in row), last) for row in ends],
            dtype=torch.int64,
            device=device,
        ).view(requests, num_groups)

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
        self._forward.read_memory(memory[requests], lengths[requests])

    @torch.no_grad()
    def run(self) -> int:
        """Do steps until all searches have ended; return how many, or a few more."""
        forward, sequences = self._forward, self._state.sequences
        for position in range(self._length - 1):
            forward.positions.fill_(position)
            forward.tokens.copy_(sequences[:, :, position].flatten())
            forward.run(to_logits=False)
        graph: torch.cuda.CUDAGraph | None = None
        steps = 0
        for _ in range(self._limit - self._length):
            if graph is not None:
                graph.replay()
            else:
                self._step()
            steps += 1
            if steps == 1 and self.decoder.use_cuda_graph and self.decoder.device.type == "cuda":
                # The first step has set cuBLAS and the kernels up; capturing runs nothing.
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._step()
            if steps % _POLL_STEPS == 0 and self._has_ended():
                break
        self.state = BeamState(*(tensor.cpu() for tensor in self._state))
        return steps

    def _has_ended(self) -> bool:
        return bool(((self._state.done != 0) | (self._state.status != 0)).all())

    def _step(self) -> None:
        state, forward, beams = self._state, self._forward, self._beams
        last = (state.lengths - 1).clamp(max=state.sequences.shape[2] - 1)
        lengths = state.lengths.clone()  # the step makes them longer
        places = last[:, None, None].expand(-1, beams, 1)
        forward.tokens.copy_(state.sequences.gather(2, places).flatten())
        forward.positions.copy_(last.repeat_interleave(beams, output_size=len(forward.positions)))
        forward.run(to_logits=True)
        chosen: list[Tensor] = []
        for group in range(self._num_groups):
            self._choose(group, lengths, chosen)
        ops.update_beam_indirection_(forward.table, self._parents, 0, forward.positions + 1)

    def _choose(self, group: int, lengths: Tensor, chosen: list[Tensor]) -> None:
        """Choose the next tokens of a group; chosen: those of earlier ones, [requests, beams]."""
        rows, slots, state = self._group_rows[group], self._group_slots[group], self._state
        is_whole = self._num_groups == 1
        logits, sequences = self._forward.logits, state.sequences.flatten(0, 1)
        scores = state.scores.flatten()
        if not is_whole:
            logits, sequences, scores = logits[rows], sequences[rows], scores[rows]
            lengths = lengths[slots]
        rules, earlier = self._rules[group], torch.cat(chosen, dim=1) if chosen else None
        processors = rules.of_step(lengths, sequences, earlier)
        if self._greedy:
            candidates = greedy_candidates(
                logits, scores, ngram_sizes=rules.ngram_sizes, **processors
            )
        else:
            candidates = log_softmax_top_k(
                logits,
                scores,
                self._num_candidates,
                num_beams=self._beams,
                **processors,
            )
        best, tokens = candidates.scores, candidates.tokens
        if self._rules_name == "scorer":
            missing = best == -torch.inf
            best = best.masked_fill(missing, MISSING_CANDIDATE_SCORE)
            tokens = torch.where(missing, self._no_end[:, group, None], tokens)
        step = beam_step(
            state, self._parameters, best, tokens, candidates.beams, log_probs=candidates.log_probs,
            status=candidates.status, slots=None if is_whole else slots, rules=self._rules_name,
        )  # fmt: skip
        self._parents[rows] = rows[step.parents]
        chosen.append(step.tokens.view(self._requests, self._beams))
