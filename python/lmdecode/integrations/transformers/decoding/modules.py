"""What transformers' modules have in common: names of activations, products joined into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.decoder.config import ActivationName

__all__ = ["ACTIVATIONS", "activation", "joined", "joined_modules"]

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


def activation(name: object) -> ActivationName:
    """Return our name of an activation function; raise ValueError for one that there is not."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(
            f"Decoding.from_pretrained: the activation function is {name!r}; "
            f"expected one of {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def joined_modules(*modules: Any) -> tuple[Tensor, Tensor | None]:
    """Return the weights and the biases of linear modules, one behind the other."""
    return joined([(module.weight, module.bias) for module in modules])
