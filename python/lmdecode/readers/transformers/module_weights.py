"""Weights while a model is read: joined, as floats, in halves, and scaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.linear.quantized_weight import LinearWeight, QuantizedWeight, join_rows
from lmdecode.models.configs import ActivationName

__all__ = ["ACTIVATIONS", "chunks", "expert_parts", "floats", "joined", "scaled", "times", "wide"]

ACTIVATIONS: dict[str, ActivationName] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def joined(linears: Sequence[tuple[Any, Tensor | None]]) -> tuple[Any, Tensor | None]:
    """Return concatenated [out, in] weights and biases; a single one is returned as it is.

    Weights may be in blocks: see ``join_rows``.
    """
    if len(linears) == 1:
        return linears[0]
    weight = join_rows([weight for weight, _ in linears])
    known = [bias for _, bias in linears if bias is not None]
    if not known:
        return weight, None
    biases = [
        known[0].new_zeros(weight.shape[0]) if bias is None else bias for weight, bias in linears
    ]
    return weight, torch.cat(biases)


def floats(weight: LinearWeight) -> Tensor:
    """Return a weight as a tensor."""
    return weight if isinstance(weight, Tensor) else weight.dequantize()


def chunks(weight: Any) -> Any:
    """Return the upper and the lower half of the rows."""
    if not isinstance(weight, QuantizedWeight):
        return weight.chunk(2)
    rows = weight.shape[0]
    return weight.rows(0, rows // 2), weight.rows(rows // 2, rows)


def expert_parts(kind: str, matrix: Tensor, is_interleaved: bool) -> Any:
    """Return an expert's matrices for ``causal_model_of``: gate and up, or down, [out, in].

    ``kind`` is "gate_up_proj" or "down_proj"; for ``is_interleaved`` see ``ExpertModules``.
    """
    if kind == "down_proj":
        return matrix.T if is_interleaved else matrix
    return (matrix[:, ::2].T, matrix[:, 1::2].T) if is_interleaved else matrix.chunk(2)


def wide(weight: LinearWeight) -> Tensor:
    """Return the tensor in at least float32, so that folding in a factor does not round more."""
    tensor = floats(weight)
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def times(factor: float, weight: Any, bias: Tensor | None) -> tuple[Any, Tensor | None]:
    """Return a weight and a bias multiplied by a factor, both unchanged if it is 1."""
    if factor == 1.0:
        return weight, bias
    return wide(weight) * factor, None if bias is None else wide(bias) * factor


def scaled(
    inputs: float, outputs: float | Tensor, weight: Any, bias: Tensor | None
) -> tuple[Any, Tensor | None]:
    """Return a weight and a bias with factors of inputs and of outputs, a number or [out]."""
    if isinstance(outputs, Tensor) and bool((outputs == 1).all()):
        outputs = 1.0
    if not isinstance(outputs, Tensor):
        weight, _ = times(inputs * outputs, weight, None)
        return weight, None if bias is None else times(outputs, bias, None)[0]
    weight = wide(weight)
    factors = (inputs * outputs.double()).to(weight.dtype)  # rounded once
    return weight * factors[:, None], None if bias is None else wide(bias) * outputs
