"""A decoder-only model again in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmdecode.decoder.causal_config import CausalConfig, CausalLayerWeights, CausalWeights
from lmdecode.decoder.mixers import GatedDeltaRule, ShortConvolution
from lmdecode.reference.decoder import feed_forward, normed
from lmdecode.reference.experts import experts
from lmdecode.reference.mixers import gated_delta_rule, short_convolution

__all__ = ["CausalCache", "causal_logits"]

# Keys and values of each layer, [num_kv_heads, length, head_size]; of a layer with a mixer the
# convolution's last inputs and what else its state is. An empty list before a text.
CausalCache = list[tuple[Tensor, Tensor]]


def _norm(config: CausalConfig, x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    return x if gamma is None else normed(config, x, gamma, beta)


def _softcap(x: Tensor, cap: float) -> Tensor:
    return x if cap == 0 else cap * torch.tanh(x / cap)


def _heads(config: CausalConfig, x: Tensor, gamma: Tensor | None = None) -> Tensor:
    """[T, heads * head_size] to [heads, T, head_size], with a norm of all, or of each head."""
    heads = (-1, config.head_size)
    if gamma is not None and gamma.shape[0] == x.shape[-1]:
        return normed(config, x, gamma, None).unflatten(-1, heads).transpose(0, 1)
    return _norm(config, x.unflatten(-1, heads), gamma, None).transpose(0, 1)


def _turned(x: Tensor, angles: Tensor, scale: float) -> Tensor:
    """[heads, T, head_size]; feature i turns with feature i + half, by [T, half] angles."""
    half = angles.shape[-1]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _attention(
    config: CausalConfig,
    number: int,
    w: CausalLayerWeights,
    rotary: tuple[Tensor, ...],
    x: Tensor,
    cache: CausalCache,
    past: int,
) -> Tensor:
    assert config.attention_scale is not None
    qkv = F.linear(x, w.qkv, w.qkv_bias)
    sizes = [config.query_size, config.key_size, config.key_size]
    q, k, v, gate = qkv.split([*sizes, config.projected_size - sum(sizes)], dim=-1)
    q, k = _heads(config, q, w.query_norm_gamma), _heads(config, k, w.key_norm_gamma)
    v = _heads(config, v)

    positions = torch.arange(past, past + x.shape[0])
    turn = config.rotary[number]
    if turn is not None:
        angles = positions[:, None].to(x.dtype) * rotary[turn].to(x.dtype)
        q, k = (_turned(heads, angles, config.rotary_scales[turn]) for heads in (q, k))
    if number < len(cache):
        keys, values = cache[number]
        k, v = torch.cat((keys, k), dim=1), torch.cat((values, v), dim=1)
        cache[number] = (k, v)
    else:
        cache.append((k, v))

    group = config.num_heads // config.num_kv_heads
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = _softcap(q @ k.mT * config.attention_scale, config.attention_softcap)
    back = positions[:, None] - torch.arange(k.shape[1])  # from a query to a key
    visible = back >= 0
    window = config.windows[number]
    if window is not None:
        visible &= back < window
    scores = scores.masked_fill(~visible, -torch.inf)
    if w.sinks is not None:
        scores = torch.cat((scores, w.sinks[:, None, None].expand(-1, x.shape[0], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[1]]
    out = (weights @ v).transpose(0, 1).flatten(1)
    if config.attention_gate:
        out = out * gate.sigmoid()
    return F.linear(out, w.attention_out, w.attention_out_bias)


def _mixed(
    config: CausalConfig, number: int, w: CausalLayerWeights, x: Tensor, cache: CausalCache
) -> Tensor:
    mixer, projected = config.mixers[number], F.linear(x, w.qkv, w.qkv_bias)
    state = cache[number] if number < len(cache) else None
    if isinstance(mixer, ShortConvolution):
        out, state = short_convolution(mixer, w, projected, state)
    else:
        assert isinstance(mixer, GatedDeltaRule)
        out, state = gated_delta_rule(mixer, w, config.norm_epsilon, projected, state)
    cache[number : number + 1] = [state]
    return F.linear(out, w.attention_out, w.attention_out_bias)


@torch.no_grad()
def causal_logits(
    config: CausalConfig,
    weights: CausalWeights,
    tokens: Tensor,
    *,
    cache: CausalCache | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the logits behind each token of a text.

    Parameters
    ----------
    config, weights
        The model.
    tokens : Tensor
        int64 [T]: the text, or what follows on that whose keys and values are in ``cache``.
    cache : list, optional
        Of each layer the keys, turned, and the values, [num_kv_heads, length, head_size], all from
        position 0 on. Those of ``tokens`` are appended. Of layers with a mixer the state behind the
        last token; see ``lmdecode.reference.mixers``. Begin with an empty list.
    dtype : torch.dtype
        In which everything is computed, angles too: float32 or float64.

    Returns
    -------
    Tensor
        [T, V] in ``dtype``.
    """
    cache = [] if cache is None else cache

    def wide(tensor: Any) -> Any:  # experts' matrices are widened when they are used
        return tensor.to(dtype) if isinstance(tensor, Tensor) else tensor

    attention = config.mixers.index(None)
    past = cache[attention][0].shape[1] if cache else 0
    embedding = weights.embedding.to(dtype)
    x = embedding[tokens] * config.embedding_scale
    if weights.positions is not None:
        x = x + weights.positions[past : past + tokens.shape[0]].to(dtype)
    for number, layer in enumerate(weights.layers):
        w = CausalLayerWeights(*map(wide, layer))
        given = _norm(config, x, w.attention_norm_gamma, w.attention_norm_beta)
        if config.mixers[number] is None:
            out = _attention(config, number, w, weights.rotary, given, cache, past)
        else:
            out = _mixed(config, number, w, given, cache)
        x = x + _norm(config, out, w.attention_out_norm_gamma, None)
        given = _norm(config, x, w.ffn_norm_gamma, w.ffn_norm_beta)
        layer_of = experts if config.has_experts(number) else feed_forward
        out = layer_of(config, w, given, F.linear)
        x = x + _norm(config, out, w.ffn_out_norm_gamma, None)
    x = _norm(config, x, wide(weights.final_norm_gamma), wide(weights.final_norm_beta))
    head = embedding if weights.logits is None else weights.logits.to(dtype)
    logits = F.linear(x, head, wide(weights.logits_bias)) * config.logits_scale
    return _softcap(logits, config.logits_softcap)
