"""A decoder on a CUDA device: its weights, and a step by cuBLAS and our kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lmdecode._checks import check_format
from lmdecode._ops import ops
from lmdecode.decoder.spares import Spares
from lmdecode.decoder.state import padded
from lmdecode.linear import ACTIVATIONS
from lmdecode.models.checks import check_weights
from lmdecode.models.configs import DecoderConfig
from lmdecode.models.weights import DecoderWeights, LayerWeights, bias_of_layer

__all__ = ["DeviceDecoder", "DeviceForward"]


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_KEPT_PLANS = 2  # each holds the caches of its searches


class DeviceDecoder:
    """A decoder's weights on a device, by default the device of ``weights``.

    ``weight_format`` is the dtype of products and caches; norms, softmax and the residual stream
    are float32. With ``use_cuda_graph`` a step is captured once for searches of one shape, and
    replayed. Raises ValueError or TypeError that names the wrong weight or argument.
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
                    moved[name] = torch.ones(
                        config.model_size, device=self.device, dtype=torch.float32
                    )
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
        bias = self.weights.relative_bias
        if bias is not None:
            self.num_distances = bias.shape[1]
            # Caches have a position for the last token of a sequence, too, which is never read.
            self.weights = self.weights._replace(relative_bias=functional.pad(bias, (0, 1)))
        self.plans: Spares[Any] = Spares(_KEPT_PLANS)  # device_loop.py


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class DeviceForward:
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
        self._own = own[:, None]
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

    def clear(self) -> None:
        """Reset the caches for new searches."""
        for cache in (self.self_keys, self.self_values, self.cross_keys, self.cross_values):
            cache.zero_()
        self.table.copy_(self._own.expand_as(self.table))

    def read_memory(self, memory: Tensor, lengths: Tensor) -> None:
        """Write keys and values of the memories of all requests, in order."""
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
        places = self.positions
        if config.unplaced_token is not None:  # out of range: the op adds nothing
            outside = -1 - config.position_offset
            places = places.masked_fill(self.tokens == config.unplaced_token, outside)
        ops.decoder_embed(
            self.tokens, places, weights.embedding, weights.positions,
            config.embedding_scale, config.position_offset, x=self.x,
        )  # fmt: skip
        if weights.embedding_norm_gamma is not None:
            ops.decoder_add_norm_(
                self.x, None, None, weights.embedding_norm_gamma, weights.embedding_norm_beta,
                config.norm_epsilon, config.norm == "rms_norm", False, out=self.normed,
            )  # fmt: skip
        # With norm_first a sublayer reads its own norm, which is fused with the residual of the
        # sublayer before, or here.
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
