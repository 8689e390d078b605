"""A decoder-only model again in plain torch: attention, experts, and layers with a state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmdecode.models.configs import CausalConfig, ExpertsConfig
from lmdecode.models.mixers import GatedDeltaRule, Mamba2, ShortConvolution
from lmdecode.models.weights import CausalLayerWeights, CausalWeights
from lmdecode.reference.decoder import activated, feed_forward, normed

__all__ = [
    "CausalCache",
    "State",
    "causal_hidden",
    "causal_logits",
    "chosen_experts",
    "experts",
    "experts_beside",
    "gated_delta_rule",
    "mamba2",
    "short_convolution",
]

# The convolution's last inputs, [taps - 1, channels], and the matrix of each value head, [heads,
# key_size, value_size], of a convolution alone an empty tensor. None before a text.
State = tuple[Tensor, Tensor]
_L2_EPSILON = 1e-6


def _convolved(
    w: CausalLayerWeights, taps: int, x: Tensor, state: State | None
) -> tuple[Tensor, Tensor]:
    """Return the convolution of x [T, channels], and its last inputs."""
    assert w.convolution is not None
    before = x.new_zeros(taps - 1, x.shape[1]) if state is None else state[0]
    inputs = torch.cat((before, x))
    out = sum(w.convolution[:, tap] * inputs[tap : tap + len(x)] for tap in range(taps))
    out = out if w.convolution_bias is None else out + w.convolution_bias
    return torch.as_tensor(out), inputs[len(x) :]


def short_convolution(
    mixer: ShortConvolution, w: CausalLayerWeights, projected: Tensor, state: State | None
) -> tuple[Tensor, State]:
    """Return the input of a layer's last projection, [T, size], and the state after the tokens.

    ``projected`` is [T, 3 * size]: B, C and x. ``state`` is the state before the tokens.
    """
    b, c, x = projected.chunk(3, dim=-1)
    out, last = _convolved(w, mixer.taps, b * x, state)
    return c * out, (last, x.new_empty(0))


def gated_delta_rule(
    mixer: GatedDeltaRule,
    w: CausalLayerWeights,
    norm_epsilon: float,
    projected: Tensor,
    state: State | None,
) -> tuple[Tensor, State]:
    """Likewise [T, num_value_heads * value_size]; see ``GatedDeltaRule``, token by token."""
    assert w.decay is not None and w.decay_bias is not None and w.mixer_norm_gamma is not None
    m, heads = mixer, mixer.num_value_heads
    qkv, z, b, a = projected.split((m.channels, m.mixed, heads, heads), dim=-1)
    qkv, last = _convolved(w, m.taps, qkv, state)
    keys = m.num_key_heads * m.key_size
    q, k, v = F.silu(qkv).split((keys, keys, m.mixed), dim=-1)
    q, k = (x.unflatten(-1, (-1, m.key_size)) for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _L2_EPSILON) for x in (q, k))
    q, k = (x.repeat_interleave(heads // m.num_key_heads, dim=1) for x in (q, k))
    q, v = q * m.key_size**-0.5, v.unflatten(-1, (heads, m.value_size))
    decays, betas = (w.decay * F.softplus(a + w.decay_bias)).exp(), b.sigmoid()
    s = v.new_zeros(heads, m.key_size, m.value_size) if state is None else state[1]
    outs = []
    for t in range(len(projected)):
        s = s * decays[t, :, None, None]
        delta = betas[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
        s = s + k[t, :, :, None] * delta[:, None, :]
        outs.append(torch.einsum("hkv,hk->hv", s, q[t]))
    out = torch.stack(outs)
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm_epsilon)
    out = (out * w.mixer_norm_gamma).flatten(1) * F.silu(z)
    return out, (last, s)


def mamba2(
    mixer: Mamba2,
    w: CausalLayerWeights,
    norm_epsilon: float,
    projected: Tensor,
    state: State | None,
) -> tuple[Tensor, State]:
    """Likewise [T, num_heads * value_size]; see ``Mamba2``, token by token."""
    assert w.decay is not None and w.decay_bias is not None and w.mixer_skip is not None
    m, heads, keys = mixer, mixer.num_heads, mixer.num_groups * mixer.key_size
    z, xbc, dt = projected.split((m.mixed, m.channels, heads), dim=-1)
    xbc, last = _convolved(w, m.taps, xbc, state)
    x, b, c = F.silu(xbc).split((m.mixed, keys, keys), dim=-1)
    x = x.unflatten(-1, (heads, m.value_size))
    b, c = (part.unflatten(-1, (m.num_groups, m.key_size)) for part in (b, c))
    b, c = (part.repeat_interleave(heads // m.num_groups, dim=1) for part in (b, c))
    steps = F.softplus(dt + w.decay_bias).clamp(m.least_step, m.most_step)
    decays = (w.decay * steps).exp()
    h = x.new_zeros(heads, m.key_size, m.value_size) if state is None else state[1]
    outs = []
    for t in range(len(projected)):
        added = b[t, :, :, None] * (steps[t, :, None] * x[t])[:, None, :]
        h = h * decays[t, :, None, None] + added
        outs.append(torch.einsum("hkv,hk->hv", h, c[t]) + w.mixer_skip[:, None] * x[t])
    out = torch.stack(outs).flatten(1)
    if w.mixer_norm_gamma is None:
        return out * F.silu(z), (last, h)
    if not m.norm_first:
        out = out * F.silu(z)
    groups = out.unflatten(-1, (m.num_groups, -1))
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + norm_epsilon)
    out = groups.flatten(1) * w.mixer_norm_gamma
    return out * F.silu(z) if m.norm_first else out, (last, h)


Linear = Callable[..., Tensor]


def chosen_experts(
    config: ExpertsConfig, logits: Tensor, choice_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each row, int64 [T, num_chosen], ascending, and their weights.

    ``logits`` are the router's, [T, E]. ``choice_bias`` [E] is added to them for the choice alone.
    """
    values = logits.sigmoid() if config.router == "sigmoid" else logits
    scores = values if choice_bias is None else values + choice_bias
    # The lower index is first among equal scores.
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    indices = order[:, : config.num_chosen].sort(dim=-1).values
    if config.router == "softmax":
        values = values.softmax(dim=-1)
    weights = values.gather(1, indices)
    if config.router == "softmax_of_chosen":
        weights = weights.softmax(dim=-1)
    if config.normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + config.epsilon)
    return indices, weights * config.scale


def experts(config: CausalConfig, w: CausalLayerWeights, x: Tensor, linear: Linear) -> Tensor:
    """Apply the experts of a layer to x, [T, D] to [T, D].

    ``linear(x, weight, bias)`` multiplies experts; the router's product is exact.
    """
    c = config.experts
    assert c is not None
    out = _routed(config, w, x, x, linear)
    if c.shared_size == 0:
        return out
    shared = feed_forward(config, w, x, linear)
    if w.shared_gate is not None:
        shared = shared * torch.sigmoid(x @ w.shared_gate)[:, None]
    return out + shared


def experts_beside(
    config: CausalConfig, w: CausalLayerWeights, x: Tensor, given: Tensor, linear: Linear
) -> Tensor:
    """Apply the experts and the shared expert of a layer with norms of each, [T, D] to [T, D].

    The shared expert reads ``given``; the router and the experts read norms of x.
    """
    shared = feed_forward(config, w, given, linear)
    router_x = normed(config, x, w.router_norm_gamma, None)
    out = _routed(config, w, normed(config, x, w.experts_norm_gamma, None), router_x, linear)
    out = normed(config, out, w.experts_out_norm_gamma, None)
    return out + normed(config, shared, w.shared_out_norm_gamma, None)


def _routed(
    config: CausalConfig, w: CausalLayerWeights, x: Tensor, router_x: Tensor, linear: Linear
) -> Tensor:
    """Return the sum of each row's experts, [T, D]."""
    c = config.experts
    assert c is not None and w.router is not None
    assert w.experts_gate is not None and w.experts_up is not None and w.experts_down is not None
    logits = torch.nn.functional.linear(router_x, w.router, w.router_bias)
    indices, weights = chosen_experts(c, logits, w.router_choice_bias)
    if w.router_scale is not None:
        weights = weights * w.router_scale[indices]
    out = torch.zeros_like(x)

    def apply(matrices: Any, biases: Tensor | None, e: int, rows: Tensor) -> Tensor:
        matrix = matrices[e]
        floats: Tensor = matrix if isinstance(matrix, Tensor) else matrix.dequantize()
        return linear(rows, floats.to(x.dtype), None if biases is None else biases[e])

    for e in indices.unique().tolist():  # ascending
        rows, places = (indices == e).nonzero(as_tuple=True)
        gate = apply(w.experts_gate, w.experts_gate_bias, e, x[rows])
        up = apply(w.experts_up, w.experts_up_bias, e, x[rows])
        if c.limit is None or c.alpha is None:
            inner = activated(config, gate) * up
        else:
            gate, up = gate.clamp(max=c.limit), up.clamp(-c.limit, c.limit)
            inner = gate * torch.sigmoid(c.alpha * gate) * (up + 1)
        output = apply(w.experts_down, w.experts_down_bias, e, inner)
        out[rows] += output * weights[rows, places, None]
    return out


# Keys and values of each layer, [num_kv_heads, length, head_size]; of a layer with a mixer the
# convolution's last inputs and what else its state is, behind these with attention beside it; of a
# layer with another layer's keys those. An empty list before a text.
CausalCache = list[tuple[Tensor, ...]]


def _norm(config: CausalConfig, x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    return x if gamma is None else normed(config, x, gamma, beta)


def _softcap(x: Tensor, cap: float) -> Tensor:
    return x if cap == 0 else cap * torch.tanh(x / cap)


def _heads(config: CausalConfig, x: Tensor, head_size: int, gamma: Tensor | None) -> Tensor:
    """[T, heads * head_size] to [heads, T, head_size], with a norm of all, or of each head."""
    heads = (-1, head_size)
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
    qkv: Tensor,
    cache: CausalCache,
    past: int,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return what heads give, and the keys and values that there are now."""
    assert config.attention_scale is not None
    sizes = config.heads(number)
    size, key_size, source = sizes.head_size, sizes.key_size, config.shared_keys[number]
    positions = torch.arange(past, past + qkv.shape[0])
    turn = config.rotary[number]

    def turned(heads: Tensor) -> Tensor:
        if turn is None:
            return heads
        angles = positions[:, None].to(qkv.dtype) * rotary[turn].to(qkv.dtype)
        return _turned(heads, angles, config.rotary_scales[turn])

    q, rest = qkv[:, : sizes.query_size], qkv[:, sizes.query_size :]
    q = turned(_heads(config, q, size, w.query_norm_gamma))
    if source is not None:
        k, v = cache[source][:2]
        gate = rest
    else:
        k, rest = rest[:, :key_size], rest[:, key_size:]
        v, gate = k, rest
        if not config.keys_are_values[number]:
            v, gate = rest[:, :key_size], rest[:, key_size:]
        k, v = turned(_heads(config, k, size, w.key_norm_gamma)), _heads(config, v, size, None)
        if config.value_norm:
            v = normed(config, v, None, None)
        if number < len(cache):
            keys, values = cache[number][:2]
            k, v = torch.cat((keys, k), dim=1), torch.cat((values, v), dim=1)
    kept = (k, v)

    group = sizes.num_heads // sizes.num_kv_heads
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = _softcap(q @ k.mT * config.attention_scale, config.attention_softcap)
    back = positions[:, None] - torch.arange(k.shape[1])  # from a query to a key
    visible = back >= 0
    window = config.windows[number]
    if window is not None:
        visible &= back < window
    scores = scores.masked_fill(~visible, -torch.inf)
    if w.sinks is not None:
        scores = torch.cat((scores, w.sinks[:, None, None].expand(-1, qkv.shape[0], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[1]]
    out = (weights @ v).transpose(0, 1).flatten(1)
    if config.attention_gate:
        out = out * gate.sigmoid()
    return out, kept


def _mixed(
    config: CausalConfig, number: int, w: CausalLayerWeights, projected: Tensor, state: Any
) -> tuple[Tensor, State]:
    mixer = config.mixers[number]
    if isinstance(mixer, ShortConvolution):
        return short_convolution(mixer, w, projected, state)
    if isinstance(mixer, Mamba2):
        return mamba2(mixer, w, config.norm_epsilon, projected, state)
    assert isinstance(mixer, GatedDeltaRule)
    return gated_delta_rule(mixer, w, config.norm_epsilon, projected, state)


def _attention_or_mixer(
    config: CausalConfig,
    number: int,
    w: CausalLayerWeights,
    rotary: tuple[Tensor, ...],
    x: Tensor,
    cache: CausalCache,
    past: int,
) -> Tensor:
    """Either, or with attention beside the mixer both, of one projection and to another."""
    projected = F.linear(x, w.qkv, w.qkv_bias)
    outs: list[Tensor] = []
    kept: tuple[Tensor, ...] = ()
    if config.has_attention(number):
        rows = config.projected_of(number)
        out, kept = _attention(config, number, w, rotary, projected[:, :rows], cache, past)
        projected = projected[:, rows:]
        outs.append(out)
    if config.mixers[number] is not None:
        state = cache[number][len(kept) :] if number < len(cache) else None
        out, state = _mixed(config, number, w, projected, state)
        kept = (*kept, *state)
        outs.append(out)
    cache[number : number + 1] = [kept]
    return F.linear(torch.cat(outs, dim=-1), w.attention_out, w.attention_out_bias)


def _per_layer_inputs(
    config: CausalConfig, weights: CausalWeights, tokens: Tensor, x: Tensor
) -> Tensor:
    """[T, num_layers, per_layer_size]: what tokens give to layers; x are their embeddings."""
    assert weights.per_layer_embedding is not None and weights.per_layer_projection is not None
    assert weights.per_layer_norm_gamma is not None
    sizes = (config.num_layers, config.per_layer_size)
    projected = F.linear(x, weights.per_layer_projection.to(x.dtype)).unflatten(-1, sizes)
    of_norm = replace(config, norm_epsilon=config.per_layer_epsilon)
    projected = normed(of_norm, projected, weights.per_layer_norm_gamma.to(x.dtype), None)
    rows = weights.per_layer_embedding[tokens].to(x.dtype).unflatten(-1, sizes)
    return rows * config.per_layer_scale + projected


def _with_input(config: CausalConfig, w: CausalLayerWeights, x: Tensor, inputs: Tensor) -> Tensor:
    assert w.per_layer_gate is not None and w.per_layer_out is not None
    inner = activated(config, F.linear(x, w.per_layer_gate)) * inputs
    return x + _norm(config, F.linear(inner, w.per_layer_out), w.per_layer_out_norm_gamma, None)


def _feed_forward(config: CausalConfig, number: int, w: CausalLayerWeights, x: Tensor) -> Tensor:
    given = _norm(config, x, w.ffn_norm_gamma, w.ffn_norm_beta)
    if not config.has_experts(number):
        return feed_forward(config, w, given, F.linear)
    if w.experts_out_norm_gamma is None:
        return experts(config, w, given, F.linear)
    return experts_beside(config, w, x, given, F.linear)


def _wide(tensor: Any, dtype: torch.dtype) -> Any:
    """Return a tensor in a dtype; experts' matrices are widened when they are used."""
    return tensor.to(dtype) if isinstance(tensor, Tensor) else tensor


@torch.no_grad()
def causal_hidden(
    config: CausalConfig,
    weights: CausalWeights,
    tokens: Tensor,
    *,
    hidden: Tensor | None = None,
    cache: CausalCache | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the output of the final norm for each token of a text: [T, D] in ``dtype``.

    The parameters are those of ``causal_logits``.
    """
    cache = [] if cache is None else cache
    attention = next(filter(config.has_attention, range(config.num_layers)))
    past = cache[attention][0].shape[1] if cache else 0
    x = weights.embedding.to(dtype)[tokens] * config.embedding_scale
    if weights.positions is not None:
        x = x + weights.positions[past : past + tokens.shape[0]].to(dtype)
    if weights.hidden_projection is not None:
        assert hidden is not None and weights.embedding_projection is not None
        x = _norm(config, x, _wide(weights.embedding_norm_gamma, dtype), None)
        before = _norm(config, hidden.to(dtype), _wide(weights.hidden_norm_gamma, dtype), None)
        x = F.linear(x, weights.embedding_projection.to(dtype))
        x = x + F.linear(before, weights.hidden_projection.to(dtype))
    inputs = None
    if config.per_layer_size:
        inputs = _per_layer_inputs(config, weights, tokens, x)
    for number, layer in enumerate(weights.layers):
        w = CausalLayerWeights(*(_wide(value, dtype) for value in layer))
        given = _norm(config, x, w.attention_norm_gamma, w.attention_norm_beta)
        out = _attention_or_mixer(config, number, w, weights.rotary, given, cache, past)
        before, x = x, x + _norm(config, out, w.attention_out_norm_gamma, None)
        out = _feed_forward(config, number, w, before if config.ffn_beside else x)
        x = x + _norm(config, out, w.ffn_out_norm_gamma, None)
        if inputs is not None:
            x = _with_input(config, w, x, inputs[:, number])
        x = x if w.layer_scale is None else x * w.layer_scale
    beta = _wide(weights.final_norm_beta, dtype)
    return _norm(config, x, _wide(weights.final_norm_gamma, dtype), beta)


@torch.no_grad()
def causal_logits(
    config: CausalConfig,
    weights: CausalWeights,
    tokens: Tensor,
    *,
    hidden: Tensor | None = None,
    cache: CausalCache | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the logits after each of the tokens, int64 [T], as [T, V] in ``dtype``.

    ``cache`` is a list, empty at first, to which the layers' keys and values of ``tokens`` are
    appended: of each layer the rotated keys, and the values, [num_kv_heads, length, head_size],
    from position 0 on; of a layer with a mixer the state after the last token. Layers with another
    layer's keys have these, too. ``hidden`` [T, D], for a model with ``hidden_projection``, is
    another model's output after its final norm for the token before each: see ``causal_hidden``.
    Everything, angles too, is computed in ``dtype``, float32 or float64.
    """
    x = causal_hidden(config, weights, tokens, hidden=hidden, cache=cache, dtype=dtype)
    head = weights.embedding if weights.logits is None else weights.logits
    logits = F.linear(x, head.to(dtype), _wide(weights.logits_bias, dtype))
    return _softcap(logits * config.logits_scale, config.logits_softcap)
