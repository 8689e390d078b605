"""The formats that weights of linear layers are packed in: their names, numbers, and which is when."""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode._checks import check_bool, check_format, check_int
from lmdecode._ops import ops
from lmdecode.quantized_weight import KINDS, JoinedWeight, LinearWeight, QuantizedWeight

__all__ = [
    "AS_IT_IS",
    "FORMATS",
    "FORMATS_WITH_ZEROS",
    "OWN_FORMATS",
    "check_linear_format",
    "format_of_head",
    "format_of_kind",
    "format_of_packed",
    "most_packed_bytes",
    "pack_weight",
    "parts_of_packed",
]

# The ops' numbers, as in csrc/linear/packed_linear.h: of what floats are rounded to, by name,
FORMATS: dict[str, int] = {"float32": 0, "bfloat16": 1, "int8": 7, "int4": 8}
_INT8_UNROTATED = 2
_FORMATS_WITH_MINIMUMS = {32: 8, 64: 9, 128: 10}  # by the size of the groups
# and of what is packed as it is: four bits with zeros, by the size of the groups, or with 8;
FORMATS_WITH_ZEROS = {32: 4, 64: 5, 128: 6}
INT4_WITH_MIDDLE = 3
# blocks of GGUF files.
_FORMATS_OF_KINDS = {
    "Q4_0": 3, "Q4_1": 8, "Q5_0": 11, "Q8_0": 11, "Q5_1": 12, "IQ4_NL": 13, "MXFP4": 14,
    "Q4_K": 15, "Q5_K": 16, "Q6_K": 17, "Q2_K": 18, "Q3_K": 19, "IQ4_XS": 20,
}  # fmt: skip
# In PackedHeader of csrc/linear/packed_layout.h: format, inputs, outputs.
_HEADER_BYTES = 64
_HEADER_FIELDS = (slice(4, 8), slice(24, 32), slice(32, 40))
MAX_FORMAT = 20
#: The name of a model's format whose weights each have the one that they came in.
AS_IT_IS = "file"
#: To the ops of whole models: each weight has its own format.
OWN_FORMATS = -1


def check_linear_format(
    op: str, dtype: object, group_size: object = None, rotate: object = None
) -> tuple[str, int, int | None]:
    """Return the name of a format, its number in the ops, and the size of its groups."""
    name = check_format(op, dtype, FORMATS)
    number = FORMATS[name]
    if rotate is not None:
        check_bool(op, "rotate", rotate)
        if name != "int8":
            raise ValueError(f"{op}: rotate is {rotate}; expected None with {name}")
        number = number if rotate else _INT8_UNROTATED
    if group_size is None:
        return name, number, 32 if name == "int4" else None
    size = check_int(op, "group_size", group_size)
    if name != "int4":
        raise ValueError(f"{op}: group_size is {size}; expected None with {name}")
    if size not in _FORMATS_WITH_MINIMUMS:
        raise ValueError(f"{op}: group_size is {size}; expected 32, 64 or 128")
    return name, _FORMATS_WITH_MINIMUMS[size], size


def format_of_packed(packed: Tensor, name: str) -> tuple[int, int | None]:
    """Return the number of the format, of this name, that a packed weight says it has.

    And the size of its groups. Of other bytes it is the number of the name, which the ops refuse.
    """
    of_name = {
        "int8": {FORMATS["int8"]: None, _INT8_UNROTATED: None},
        "int4": {INT4_WITH_MIDDLE: 32}
        | {number: size for size, number in FORMATS_WITH_ZEROS.items()}
        | {number: size for size, number in _FORMATS_WITH_MINIMUMS.items()},
    }.get(name, {FORMATS[name]: None})
    number = int.from_bytes(bytes(packed[_HEADER_FIELDS[0]].tolist()), "little")
    if number not in of_name:
        number = FORMATS[name]
    return number, of_name[number]


def format_of_kind(kind: str) -> int:
    """Return the format that holds blocks of GGUF files as they are."""
    return _FORMATS_OF_KINDS[kind]


def format_of_head(name: str) -> str:
    """Return the format of a projection to the vocabulary in a model of this one.

    Four bits would cost there as much as in all other layers: a head of "int4" is int8.
    """
    return "int8" if name == "int4" else name


def pack_weight(weight: LinearWeight, name: str) -> Tensor:
    """Return a weight as the ops take it, uint8 [bytes].

    Parameters
    ----------
    weight
        [out_features, in_features]: floats, or blocks of a GGUF file.
    name
        A format that floats are rounded to; or "file": blocks are packed as they are, floats as
        bfloat16 where they are bfloat16, else as float32.
    """
    if isinstance(weight, JoinedWeight):
        return torch.cat([pack_weight(part, name) for part in weight.parts])
    if isinstance(weight, QuantizedWeight):
        if name == AS_IT_IS:
            return ops.pack_gguf_linear(weight.data, KINDS[weight.kind].number)
        weight = weight.dequantize()
    if name == AS_IT_IS:
        name = "bfloat16" if weight.dtype == torch.bfloat16 else "float32"
    return ops.pack_linear(weight.detach().float(), FORMATS[name])


def _packed_bytes(shape: tuple[int, int], number: int) -> int:
    """Return the bytes of a packed weight; of any format, for the fake only counts."""
    return int(ops.pack_linear(torch.empty(shape, device="meta"), number).numel())


def most_packed_bytes(shape: tuple[int, int], name: str) -> int:
    """Return what a weight of [out_features, in_features] takes at most, as ``pack_weight`` has it.

    A weight may be parts, each of which has a header and outputs that fill it up.
    """
    number = FORMATS["float32"] if name == AS_IT_IS else FORMATS[name]
    number = FORMATS["int8"] if name == "int4" else number  # of the head
    rest = 2 * _packed_bytes((1, shape[1]), number) if name == AS_IT_IS else 0
    return _packed_bytes(shape, number) + rest


def parts_of_packed(memory: Tensor, at: int, out_features: int) -> list[tuple[int, int]]:
    """Return where the parts of a packed weight begin in a memory, and their bytes."""
    parts, left = [], out_features
    while left > 0:
        header = memory[at : at + _HEADER_BYTES].tolist()
        number, inputs, outputs = (
            int.from_bytes(bytes(header[field]), "little") for field in _HEADER_FIELDS
        )
        if number > MAX_FORMAT or not 0 < outputs <= left:
            raise ValueError(f"a packed weight at byte {at} has a damaged header")
        parts.append((at, _packed_bytes((outputs, inputs), number)))
        at, left = at + parts[-1][1], left - outputs
    return parts
