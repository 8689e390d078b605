"""Cross-attention weights of a decoder's heads, for known tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lmdecode.decoder.state import DecodingCaches
from lmdecode.linear import PackedLinear, layer_norm
from lmdecode.models.configs import DecoderConfig
from lmdecode.models.packed_stack import PackedDecoder
from lmdecode.models.weights import LayerWeights

__all__ = ["CrossAttention"]


class _Layer:
    """One layer of Whisper's decoder, on the packed weights of the ops."""

    def __init__(self, config: DecoderConfig, weights: LayerWeights, dtype: str) -> None:
        self._config, self._weights = config, weights
        model, inner = config.model_size, config.attention_size

        def linear(name: str, inputs: int, outputs: int) -> PackedLinear:
            bias = getattr(weights, f"{name}_bias")
            return PackedLinear.from_packed(
                getattr(weights, name),
                bias,
                in_features=inputs,
                out_features=outputs,
                dtype=dtype,
            )

        self._qkv = linear("qkv", model, 3 * inner)
        self._self_out = linear("self_out", inner, model)
        self._cross_query = linear("cross_query", model, inner)
        self._cross_out = linear("cross_out", inner, model)
        self._up = linear("ffn_up", model, config.ffn_size)
        self._down = linear("ffn_down", config.ffn_size, model)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        gamma, beta = (getattr(self._weights, f"{name}_norm_{part}") for part in ("gamma", "beta"))
        return layer_norm(x, gamma, beta, eps=self._config.norm_epsilon)

    def _heads(self, x: Tensor) -> Tensor:
        """Return [heads, T, head_size] of [T, heads * head_size]."""
        return x.view(len(x), self._config.num_heads, -1).transpose(0, 1)

    def run(
        self, x: Tensor, keys: Tensor, values: Tensor, wanted: Sequence[int], *, is_last: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output rows, and the attention weights of the wanted heads.

        ``x`` is [T, model_size], ``keys`` [heads, head_size, S], ``values`` [heads, S, head_size].
        With ``is_last`` the output rows are not needed.
        """
        scale = self._config.attention_scale
        assert scale is not None
        q, k, v = (self._heads(part) for part in self._qkv(self._normed("self", x)).chunk(3, -1))
        own = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        x = self._self_out(own.transpose(0, 1).flatten(1), residual=x)
        queries = self._heads(self._cross_query(self._normed("cross", x)))
        if is_last:
            heads = list(wanted)
            return x, torch.baddbmm(
                keys.new_zeros(()), queries[heads], keys[heads], beta=0, alpha=scale
            ).softmax(-1)
        weights = torch.baddbmm(keys.new_zeros(()), queries, keys, beta=0, alpha=scale).softmax(-1)
        x = self._cross_out((weights @ values).transpose(0, 1).flatten(1), residual=x)
        x = self._down(
            self._up(self._normed("ffn", x), activation=self._config.activation), residual=x
        )
        return x, weights[list(wanted)]


class CrossAttention:
    """Computes the cross-attention of some (layer, head) pairs, in one pass over known tokens.

    The decoder's layers have a layer norm before each sublayer and no gate, as in Whisper. Raises
    ValueError for another decoder, or for a head that it does not have.
    """

    def __init__(self, decoder: PackedDecoder, heads: Sequence[tuple[int, int]]) -> None:
        config = decoder.config
        if config.norm != "layer_norm" or not config.norm_first or config.gated:
            raise ValueError(
                "CrossAttention: decoder has other layers; expected a layer norm before each "
                "sublayer, and no gate"
            )
        for layer, head in heads:
            if not (0 <= layer < config.num_layers and 0 <= head < config.num_heads):
                raise ValueError(
                    f"CrossAttention: heads has ({layer}, {head}); expected layers below "
                    f"{config.num_layers} and heads below {config.num_heads}"
                )
        self._decoder, self._heads = decoder, list(heads)
        count = max((layer for layer, _ in heads), default=-1) + 1
        self._layers = [
            _Layer(config, decoder.layer(i), decoder.weight_format) for i in range(count)
        ]

    @torch.autocast("cpu", enabled=False)
    def weights(self, tokens: Sequence[int], caches: DecodingCaches, request: int) -> Tensor:
        """Return [heads, T, S] float32: the attention of each token, as it is read, to the memory.

        ``tokens`` is the whole sequence, [T]. ``caches`` hold the keys and values of the memory of
        ``request``.
        """
        config = self._decoder.config
        x = self._decoder.embedding[list(tokens)] * config.embedding_scale
        x += self._decoder.parts["positions"][config.position_offset :][: len(tokens)]
        length, size = int(caches.memory_lengths[request]), config.head_size
        found: dict[int, Tensor] = {}
        for i, layer in enumerate(self._layers):
            wanted = [place for place, (at, _) in enumerate(self._heads) if at == i]
            x, weights = layer.run(
                x,
                caches.cross_keys[i, request, :, :size, :length],
                caches.cross_values[i, request, :, :length, :size],
                [self._heads[place][1] for place in wanted],
                is_last=i + 1 == len(self._layers),
            )
            found |= dict(zip(wanted, weights, strict=True))
        return torch.stack([found[place] for place in range(len(self._heads))])
