"""The weights of a folder of safetensors, one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Container
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from lmdecode.linear.quantized_weight import QuantizedWeight
from lmdecode.readers.transformers.module_weights import expert_parts

__all__ = ["READ_BUFFERS", "Checkpoint", "mxfp4_weight"]


_PARAMETER = re.compile(r"(.+)\.experts\.(gate_up_proj|down_proj)")
_OF_EXPERT = (
    {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},  # LFM2's
)
_FUSED = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}  # granite's
_ROUTER = (re.compile(r"(.+\.block_sparse_moe\.router)\.weight"), r"\1.layer.weight")


def mxfp4_weight(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """Return a matrix of MXFP4 in the blocks of GGUF files, with the same values.

    ``blocks`` is uint8 [out, groups, 16]: each byte has elements 2 i and 2 i + 1 of a group, the
    low half first. ``scales`` is uint8 [out, groups]: exponents + 127.
    """
    elements = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [out, groups, 32]
    halves = elements[..., :16] | elements[..., 16:] << 4
    data = torch.cat((scales[..., None], halves), dim=-1)
    return QuantizedWeight(data.flatten(1).contiguous(), "MXFP4")


class ExpertTensors:
    """The tensors of experts that a folder has under other names than the model's parameters.

    ``part(name, index)`` returns an expert's part of a tensor [E, ...], and ``part(name, None)``
    all of it. ``shape`` returns the shape of a tensor, ``names`` are the folder's tensors.
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
        """Tell whether there is a parameter of experts that has this shape in the model."""
        found = self._find(parameter)
        return found is not None and found.shapes(shape)

    def read(self, parameter: str) -> Callable[[int], Any] | None:
        """Return the function that reads experts for ``causal_model_of``, or None."""
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


# Buffers that are read like weights.
READ_BUFFERS = (".expert_bias", ".layer_scalar")


class Checkpoint:
    """The tensors of a folder's safetensors files, by the model's names."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        self._open: dict[Path, Any] = {}
        self._experts = ExpertTensors(files, self._part, self.shape)

    @classmethod
    def of(cls, folder: Path, model: Any) -> Checkpoint | None:
        """Return the checkpoint of a folder; None if the model's tensors have other names."""
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if single.is_file():  # transformers prefers this one
            with safe_open(single, framework="pt") as opened:
                files = dict.fromkeys(opened.keys(), single)
        elif index.is_file():
            names = json.loads(index.read_text())["weight_map"]
            files = {name: folder / file for name, file in names.items()}
        else:
            return None
        checkpoint = cls(files)
        tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        for target, source in tied.items():
            # transformers ties two tensors of the folder only if they are equal.
            both = target in files and source in files
            if both and not checkpoint._are_equal(target, source):
                return None
        if any(
            name.endswith(READ_BUFFERS) and name not in files for name, _ in model.named_buffers()
        ):
            return None
        for name, parameter in model.named_parameters():
            if not checkpoint.has(name, list(parameter.shape)):
                found = checkpoint._experts.renamed(name) or name
                if found in files or name not in tied:
                    return None
        return checkpoint

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors."""
        return self._files.keys()

    def has(self, name: str, shape: list[int]) -> bool:
        """Whether there is a parameter of this name and shape."""
        if self._experts.has(name, shape):
            return True
        found = self._experts.renamed(name) or name
        return found in self._files and self.shape(found) == shape

    def _file(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def _are_equal(self, first: str, second: str) -> bool:
        one, other = self.read(first), self.read(second)
        return one.dtype == other.dtype and torch.equal(one, other)

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor."""
        shape: list[int] = self._file(name).get_slice(name).get_shape()
        return shape

    def _part(self, name: str, index: int | None) -> Tensor:
        """Return a tensor, or its part at a first index."""
        if index is None:
            whole: Tensor = self._file(name).get_tensor(name)
            return whole
        part: Tensor = self._file(name).get_slice(name)[index : index + 1][0]
        return part

    def read(self, name: str) -> Any:
        """Return a tensor in its own dtype; for experts, a function that returns one's matrices."""
        experts = self._experts.read(name)
        return self._part(self._experts.renamed(name) or name, None) if experts is None else experts
