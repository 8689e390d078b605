"""Layers with a state again in plain torch: convolutions, the gated delta rule, Mamba-2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lmdecode.decoder.causal_config import CausalLayerWeights
from lmdecode.decoder.mixers import GatedDeltaRule, Mamba2, ShortConvolution

__all__ = ["State", "gated_delta_rule", "mamba2", "short_convolution"]

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
    """Return what a layer's last projection takes, [T, size], and the state behind the tokens.

    Parameters
    ----------
    mixer, w
        The layer's.
    projected : Tensor
        [T, 3 * size]: B, C and x.
    state : tuple or None
        That behind the tokens before.
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
