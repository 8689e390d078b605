"""Checks of a model's modules, before its weights are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from lmdecode.decoder.causal_config import CausalLayerWeights
from lmdecode.integrations.transformers.decoding.causal_models.architecture import (
    NORMS,
    LayerModules,
    Trunk,
    linears_of,
    refused,
)

__all__ = ["check_modules"]


def check_modules(
    trunk: Trunk,
    head: Any,
    layers: Sequence[LayerModules],
    names: Mapping[Any, str],
    *,
    is_read_by_name: bool,
) -> None:
    """Refuse modules of unexpected types, and parameters that are not read.

    ``names`` has the name of each module. ``is_read_by_name``: values come from elsewhere, by the
    parameters' names. Raises ValueError if a linear module has another type, a norm an unexpected
    bias, weights are no floats or have no values, or no module of ``trunk`` and ``layers`` reads a
    parameter.
    """
    modules = [trunk.embedding, trunk.final_norm, trunk.positions]
    linears, read = [head], set[int]()
    if trunk.per_layer is not None:
        modules += [trunk.per_layer.embedding, trunk.per_layer.norm]
        linears.append(trunk.per_layer.projection)
    for layer in layers:
        ffn = (layer.ffn_gate, layer.ffn_up, layer.ffn_down)
        parts = (*layer.qkv, layer.attention_out, *ffn)
        linears += [m for part in parts if part is not None for m in linears_of(part)]
        if layer.experts is not None:
            shared_gate = layer.experts.shared_gate
            linears += [] if shared_gate is None else [shared_gate]
            modules.append(layer.experts.router)
            read |= {id(parameter) for parameter in layer.experts.experts.parameters()}
            if layer.experts.choice_bias is not None:
                read.add(id(getattr(*layer.experts.choice_bias)))
            for around in (layer.experts.router_norm, layer.experts.scales):
                read |= set() if around is None else {id(getattr(*around))}
        linears += [] if layer.per_layer is None else list(layer.per_layer)
        if layer.sinks:
            read.add(id(layer.attention.sinks))
        if layer.delta_rule is not None:
            parameters = ("A_log", "dt_bias", "D")
            read |= {id(getattr(layer.delta_rule, name, None)) for name in parameters}
        for name in NORMS:
            norm = getattr(layer, name)
            has_bias = getattr(norm, "bias", None) is not None
            if has_bias and f"{name}_beta" not in CausalLayerWeights._fields:
                raise refused(f"{names[norm]} has a bias; expected none")
            modules.append(norm)
        modules.append(layer.convolution)
        if layer.delta_rule is not None and hasattr(layer.delta_rule.norm, "weight"):
            modules.append(layer.delta_rule.norm)
    for module in linears:
        if type(module) not in (torch.nn.Linear, Conv1D):
            raise refused(
                f"{names[module]} is a {type(module).__name__}; expected a torch.nn.Linear"
            )
    modules = [module for module in (*modules, *linears) if module is not None]
    for module in modules:
        weight = module.weight
        is_there = is_read_by_name or not weight.is_meta
        if not weight.is_floating_point() or not is_there:
            come = f"of {weight.dtype}" if is_there else "not loaded"
            raise refused(f"the weights of {names[module]} are {come}; expected floats")
    read |= {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    others = [
        name for name, parameter in trunk.root.named_parameters() if id(parameter) not in read
    ]
    if others:
        raise refused(
            f"model has {len(others)} parameters that its type does not have, {others[0]} "
            "the first; expected none"
        )
