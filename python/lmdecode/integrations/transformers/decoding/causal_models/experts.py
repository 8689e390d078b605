"""Experts of a model of transformers: what layers have in common, and the weights of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from lmdecode.decoder.experts import ExpertMatrices, ExpertsConfig
from lmdecode.integrations.transformers.decoding.causal_models.architecture import (
    Architecture,
    ExpertModules,
    LayerModules,
    refused,
)
from lmdecode.integrations.transformers.decoding.causal_models.values import (
    expert_parts,
    floats,
    times,
    wide,
)

__all__ = ["expert_weights", "experts_config", "inner_size"]


def inner_size(layer: LayerModules) -> int:
    """Return the inner features of a feed-forward layer that is not of experts."""
    up = layer.ffn_up
    size = int(up.weight.shape[1 if type(up) is Conv1D else 0])
    return size // 2 if up is layer.ffn_gate else size


def experts_config(
    architecture: Architecture, config: Any, layers: Sequence[LayerModules]
) -> ExpertsConfig | None:
    """Return what the layers' experts have in common."""
    are_there = [layer.experts is not None for layer in layers]
    if architecture.experts is None or not any(are_there):
        return None
    of_experts = [layer for layer in layers if layer.experts is not None]
    first = of_experts[0]
    assert first.experts is not None
    shared = sorted({0 if m.ffn_up is None else inner_size(m) for m in of_experts})
    if len(shared) > 1:
        raise refused(
            f"feed-forward layers beside experts have {', '.join(map(str, shared))} inner "
            "features; expected the same number in all layers"
        )
    down = first.experts.experts.down_proj
    return ExpertsConfig(
        size=int(down.shape[1 if first.experts.is_interleaved else 2]),
        shared_size=shared[0],
        layers=tuple(are_there),
        **architecture.experts(config),
    )


def expert_weights(
    modules: ExpertModules,
    parameter: Callable[[Any, str], Tensor | None],
    read: Callable[[str], Any] | None,
    factor: float,
) -> dict[str, Any]:
    """Return the weights of a layer's experts; matrices are read as they are asked for.

    Parameters
    ----------
    modules
        Of the layer.
    parameter
        Returns the parameter of a module, by its name there.
    read
        Returns a function of an expert's index for ``gate_up_proj`` and ``down_proj``: see
        ``causal_model_of``. None: the module's own parameters.
    factor
        What outputs are multiplied by.
    """
    experts, count = modules.experts, modules.router.weight.shape[0]

    def of_module(kind: str) -> Callable[[int], Any]:
        return lambda e: expert_parts(kind, getattr(experts, kind)[e], modules.is_interleaved)

    read = read or of_module
    gate_up, down = read("gate_up_proj"), read("down_proj")
    choice, shared = modules.choice_bias, None
    if modules.shared_gate is not None:
        shared = parameter(modules.shared_gate, "weight")

    def half(index: int) -> ExpertMatrices:
        return ExpertMatrices(count, lambda e: gate_up(e)[index])

    gate_up_bias = parameter(experts, "gate_up_proj_bias")
    down_bias = parameter(experts, "down_proj_bias")
    gate_bias, up_bias = None, None
    if gate_up_bias is not None:
        halves = (
            (gate_up_bias[:, ::2], gate_up_bias[:, 1::2])
            if modules.is_interleaved
            else gate_up_bias.chunk(2, dim=1)
        )
        gate_bias, up_bias = halves
    return {
        "router": parameter(modules.router, "weight"),
        "router_bias": parameter(modules.router, "bias"),
        "router_choice_bias": None if choice is None else parameter(*choice),
        "experts_gate": half(0),
        "experts_gate_bias": gate_bias,
        "experts_up": half(1),
        "experts_up_bias": up_bias,
        "experts_down": ExpertMatrices(count, lambda e: times(factor, down(e), None)[0]),
        "experts_down_bias": None if down_bias is None else times(factor, down_bias, None)[0],
        "shared_gate": None if shared is None else floats(shared).reshape(-1),
        **_around(modules, parameter),
    }


def _around(
    modules: ExpertModules, parameter: Callable[[Any, str], Tensor | None]
) -> dict[str, Tensor | None]:
    """Return the router's norm, and what weights are multiplied by."""
    gamma = None
    if modules.router_norm is not None:
        gamma = parameter(*modules.router_norm)
        assert gamma is not None
        gamma = wide(gamma) * modules.router_norm_factor
    scales = None if modules.scales is None else parameter(*modules.scales)
    return {"router_norm_gamma": gamma, "router_scale": scales}
