"""Linear weights in the blocks of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import type_error
from lmdecode._ops import ops

__all__ = [
    "KINDS", "BlockType", "JoinedWeight", "LinearWeight", "QuantizedWeight", "index_rows",
    "join_columns", "join_rows",
]  # fmt: skip


class BlockType(NamedTuple):
    """A type of llama.cpp's blocks; ``number`` is its number in files."""

    block_size: int  # weights, consecutive in a row
    block_bytes: int
    number: int
    format: int  # of packed weights, which hold the blocks unchanged
    group_size: int  # weights that share a scale


def _block_types() -> Iterator[tuple[str, BlockType]]:
    for index in count():
        name, *numbers = ops.gguf_type(index)
        if not name:
            return
        yield name.to_bytes(8, "little").rstrip(b"\0").decode(), BlockType(*numbers)


#: By the names of ggml; ``lmdecode.reference.gguf`` reads the blocks.
KINDS: dict[str, BlockType] = dict(_block_types())


class QuantizedWeight:
    """A linear weight in blocks along its inputs, with a row for each output.

    Parameters
    ----------
    data : Tensor
        uint8 [out_features, bytes], consecutive rows of whole blocks. It is not copied: it may be a
        mapped file.
    kind : str
        The blocks' type, one of ``KINDS``.

    Raises
    ------
    TypeError, ValueError
        Another kind, or data of another dtype, shape or strides.

    Examples
    --------
    >>> weight = QuantizedWeight(torch.zeros(2, 36, dtype=torch.uint8), "Q4_0")
    >>> weight.shape, weight.dequantize().abs().max()
    ((2, 64), tensor(0.))
    """

    def __init__(self, data: Tensor, kind: str) -> None:
        if not isinstance(data, Tensor):
            raise type_error("QuantizedWeight", "data", data, "a tensor")
        if not isinstance(kind, str) or kind not in KINDS:
            expected = ", ".join(KINDS)
            raise ValueError(f"QuantizedWeight: kind is {kind!r}; expected one of {expected}")
        if data.dtype != torch.uint8 or data.dim() != 2 or not data.is_contiguous():
            raise ValueError(
                f"QuantizedWeight: data is {data.dtype} {list(data.shape)} with strides "
                f"{list(data.stride())}; expected contiguous uint8 [out_features, bytes]"
            )
        if data.device.type != "cpu":
            raise ValueError(f"QuantizedWeight: data is on {data.device}; expected a tensor on cpu")
        if data.shape[1] % KINDS[kind].block_bytes:
            raise ValueError(
                f"QuantizedWeight: data has rows of {data.shape[1]} bytes; expected a multiple of "
                f"{KINDS[kind].block_bytes}, as kind is {kind}"
            )
        self.data, self.kind = data, kind

    @property
    def shape(self) -> tuple[int, int]:
        """Return outputs and inputs."""
        kind = KINDS[self.kind]
        return self.data.shape[0], self.data.shape[1] // kind.block_bytes * kind.block_size

    def index_rows(self, index: Tensor) -> QuantizedWeight:
        """Return the rows with these indices, int64 [rows], in their order, still in blocks."""
        return QuantizedWeight(self.data[index], self.kind)

    def rows(self, begin: int, end: int) -> QuantizedWeight:
        """Return a range of rows, without a copy."""
        return QuantizedWeight(self.data[begin:end], self.kind)

    def dequantize(self) -> Tensor:
        """Return the values, float32 [out_features, in_features]."""
        return ops.dequantize_gguf(self.data, KINDS[self.kind].number)

    def __repr__(self) -> str:
        return f"QuantizedWeight({list(self.shape)}, {self.kind})"


@dataclass(frozen=True)
class JoinedWeight:
    """The concatenated rows of two or more weights of different kinds with the same inputs."""

    parts: tuple[QuantizedWeight | Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Return outputs and inputs."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def index_rows(self, index: Tensor) -> LinearWeight:
        """Return the rows with these indices, int64 [rows], in their order: see ``join_rows``."""
        ends = torch.tensor([part.shape[0] for part in self.parts], device="cpu").cumsum(0)
        parts, counts = torch.unique_consecutive(
            torch.bucketize(index, ends, right=True), return_counts=True
        )
        found: list[QuantizedWeight | Tensor] = []
        for i, rows in zip(parts.tolist(), index.split(counts.tolist()), strict=True):
            part = self.parts[i]
            rows = rows - (int(ends[i]) - part.shape[0])
            found.append(part[rows] if isinstance(part, Tensor) else part.index_rows(rows))
        return join_rows([join_rows(list(run)) for _, run in groupby(found, key=_kind)])

    def dequantize(self) -> Tensor:
        """Return the values, float32 [out_features, in_features]."""
        return torch.cat([_floats(part).float() for part in self.parts])


LinearWeight = Tensor | QuantizedWeight | JoinedWeight


def index_rows(weight: LinearWeight, index: Tensor) -> LinearWeight:
    """Return the rows of any weight with these indices, int64 [rows], in their order."""
    return weight[index] if isinstance(weight, Tensor) else weight.index_rows(index)


def _kind(part: QuantizedWeight | Tensor) -> str | None:
    return None if isinstance(part, Tensor) else part.kind


def _floats(part: LinearWeight) -> Tensor:
    return part if isinstance(part, Tensor) else part.dequantize()


def join_rows(parts: Sequence[LinearWeight]) -> LinearWeight:
    """Return the concatenated rows of weights with the same inputs, [sum of outputs, inputs].

    Floats become one tensor, blocks of one kind a ``QuantizedWeight``, others a ``JoinedWeight``.
    Raises ValueError if there are no weights, or their inputs differ.
    """
    flat: list[Tensor | QuantizedWeight] = []
    for part in parts:
        flat += part.parts if isinstance(part, JoinedWeight) else (part,)
    if not flat:
        raise ValueError("join_rows: parts has no weight; expected one at least")
    for part in flat:
        if part.shape[1:] != flat[0].shape[1:]:
            raise ValueError(
                f"join_rows: parts have shapes {[list(part.shape) for part in flat]}; expected the "
                "same inputs"
            )
    if len(flat) == 1:
        return flat[0]
    quantized = [part for part in flat if isinstance(part, QuantizedWeight)]
    if not quantized:
        return torch.cat([part for part in flat if isinstance(part, Tensor)])
    if len(quantized) == len(flat) and len({part.kind for part in quantized}) == 1:
        return QuantizedWeight(torch.cat([part.data for part in quantized]), quantized[0].kind)
    return JoinedWeight(tuple(flat))


def split_columns(weight: LinearWeight, at: int) -> tuple[LinearWeight, LinearWeight]:
    """Return the first columns of a weight, and those from column ``at`` on.

    Blocks that no bound cuts stay blocks; anything else becomes floats.
    """
    if isinstance(weight, QuantizedWeight):
        kind = KINDS[weight.kind]
        if at % kind.block_size == 0:
            cut = at // kind.block_size * kind.block_bytes
            parts = (weight.data[:, :cut], weight.data[:, cut:])
            first, second = (QuantizedWeight(part.contiguous(), weight.kind) for part in parts)
            return first, second
    floats = _floats(weight)
    return floats[:, :at], floats[:, at:]


def join_columns(parts: Sequence[LinearWeight]) -> Tensor | QuantizedWeight:
    """Return the columns of weights with the same outputs side by side, [outputs, sum of inputs].

    Blocks of one kind stay blocks; anything else becomes floats. Raises ValueError if there are no
    weights, or their outputs differ.
    """
    if not parts or any(part.shape[0] != parts[0].shape[0] for part in parts):
        raise ValueError(
            f"join_columns: parts have shapes {[list(part.shape) for part in parts]}; expected one "
            "or more with the same outputs"
        )
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) == len(parts) and len({part.kind for part in quantized}) == 1:
        return QuantizedWeight(torch.cat([part.data for part in quantized], 1), quantized[0].kind)
    return torch.cat([_floats(part) for part in parts], 1)
