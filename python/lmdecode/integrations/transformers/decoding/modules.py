"""What transformers' modules have in common: names of activations, products joined into one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmdecode.decoder.config import ActivationName

__all__ = ["ACTIVATIONS", "joined"]

ACTIVATIONS: dict[str, ActivationName] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def joined(linears: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Return [out, in] weights and biases of several, one behind the other; of one, its own."""
    if len(linears) == 1:
        return linears[0]
    weight = torch.cat([weight for weight, _ in linears])
    if all(bias is None for _, bias in linears):
        return weight, None
    biases = [
        weight.new_zeros(weight.shape[0]) if bias is None else bias for weight, bias in linears
    ]
    return weight, torch.cat(biases)
