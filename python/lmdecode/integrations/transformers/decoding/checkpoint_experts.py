"""The experts of a folder of safetensors, whose tensors have other names than the model's.

transformers has the matrices of all experts in one parameter. Folders have a tensor for each expert
and kind, or that parameter, by its name or another; or blocks of MXFP4 and their scales.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode.integrations.transformers.decoding.causal_models.values import expert_parts
from lmdecode.linear.quantized_weight import QuantizedWeight

__all__ = ["ExpertTensors", "mxfp4_weight"]

_PARAMETER = re.compile(r"(.+)\.experts\.(gate_up_proj|down_proj)")
_OF_EXPERT = (
    {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},  # LFM2's
)
_FUSED = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}  # granite's
_ROUTER = (re.compile(r"(.+\.block_sparse_moe\.router)\.weight"), r"\1.layer.weight")


def mxfp4_weight(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """Return a matrix of MXFP4 in the blocks that GGUF files have: the same numbers.

    Parameters
    ----------
    blocks : Tensor
        uint8 [out, groups, 16]: elements 2 i and 2 i + 1 of a group in the halves of a byte, the
        low half first.
    scales : Tensor
        uint8 [out, groups]: exponents + 127.
    """
    elements = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [out, groups, 32]
    halves = elements[..., :16] | elements[..., 16:] << 4
    data = torch.cat((scales[..., None], halves), dim=-1)
    return QuantizedWeight(data.flatten(1).contiguous(), "MXFP4")


class ExpertTensors:
    """What a folder has in the place of parameters that it does not have by name.

    Parameters
    ----------
    names : container of str
        Of the folder's tensors.
    part : callable
        ``part(name, index)`` returns the part of a tensor, [E, ...], of an expert, and
        ``part(name, None)`` all of it.
    shape : callable
        Returns the shape of a tensor.
    """

    def __init__(
        self,
        names: Container[str],
        part: Callable[[str, int | None], Tensor],
        shape: Callable[[str], list[int]],
    ) -> None:
        self._names, self._part, self._shape = names, part, shape

    def renamed(self, parameter: str) -> str | None:
        """Return the name of a tensor that is a parameter as a whole."""
        pattern, replacement = _ROUTER
        name = pattern.sub(replacement, parameter)
        return name if name != parameter and name in self._names else None

    def has(self, parameter: str, shape: list[int]) -> bool:
        """Whether there is a parameter of experts, of this shape in the model."""
        found = self._find(parameter)
        return found is not None and found.shapes(shape)

    def read(self, parameter: str) -> Callable[[int], Any] | None:
        """Return what ``causal_model_of`` reads of a parameter of experts, or None."""
        found = self._find(parameter)
        return None if found is None else found.read

    def _find(self, parameter: str) -> _Found | None:
        match = _PARAMETER.fullmatch(parameter)
        if match is None:
            return None
        prefix, kind = match.groups()
        blocks, scales = f"{parameter}_blocks", f"{parameter}_scales"
        if parameter in self._names:
            return self._whole(parameter, kind)
        if blocks in self._names and scales in self._names:
            return self._mxfp4(blocks, scales, kind)
        if (fused := f"{prefix}.{_FUSED[kind]}") in self._names:
            return self._whole(fused, kind)
        for parts in _OF_EXPERT:
            if f"{prefix}.experts.0.{parts[kind][0]}.weight" in self._names:
                return self._single(prefix, parts[kind])
        return None

    def _whole(self, name: str, kind: str) -> _Found:
        is_interleaved = f"{name}_bias" in self._names

        def read(expert: int) -> Any:
            return expert_parts(kind, self._part(name, expert), is_interleaved)

        return _Found(lambda shape: self._shape(name) == shape, read)

    def _mxfp4(self, blocks: str, scales: str, kind: str) -> _Found:
        def fits(shape: list[int]) -> bool:  # the model's is [E, in, out]
            groups = [shape[0], shape[2], shape[1] // 32]
            return self._shape(blocks) == [*groups, 16] and self._shape(scales) == groups

        def read(expert: int) -> Any:
            parts = self._part(blocks, expert), self._part(scales, expert)
            if kind == "down_proj":
                return mxfp4_weight(*parts)
            return tuple(mxfp4_weight(*(part[i::2] for part in parts)) for i in (0, 1))

        return _Found(fits, read)

    def _single(self, prefix: str, parts: tuple[str, ...]) -> _Found:
        def name(expert: int, of_expert: str) -> str:
            return f"{prefix}.experts.{expert}.{of_expert}.weight"

        def fits(shape: list[int]) -> bool:
            expected = [shape[1] // len(parts), shape[2]]
            names = [name(e, part) for e in range(shape[0]) for part in parts]
            return all(n in self._names and self._shape(n) == expected for n in names)

        def read(expert: int) -> Any:
            read = [self._part(name(expert, part), None) for part in parts]
            return tuple(read) if len(read) > 1 else read[0]

        return _Found(fits, read)


class _Found(NamedTuple):
    """How a parameter is found: whether it has a shape, and the parts of an expert."""

    shapes: Callable[[list[int]], bool]
    read: Callable[[int], Any]
