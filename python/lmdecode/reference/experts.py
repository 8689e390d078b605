"""A feed-forward layer of experts in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmdecode.decoder.causal_config import CausalConfig, CausalLayerWeights
from lmdecode.decoder.experts import ExpertsConfig
from lmdecode.reference.decoder import activated, feed_forward, normed

__all__ = ["chosen_experts", "experts", "experts_beside"]

Linear = Callable[..., Tensor]


def chosen_experts(
    config: ExpertsConfig, logits: Tensor, choice_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each row, int64 [T, num_chosen], ascending, and their weights.

    Parameters
    ----------
    config
        Of the experts.
    logits
        [T, E] of the router.
    choice_bias
        [E] or None: added to what experts are chosen by.
    """
    values = logits.sigmoid() if config.router == "sigmoid" else logits
    scores = values if choice_bias is None else values + choice_bias
    # Of equal scores the lower index is first.
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
