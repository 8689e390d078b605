"""Formats of packed linear weights: their names, and their numbers in the ops."""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode._checks import check_bool, check_format, check_int
from lmdecode._ops import ops
from lmdecode.linear.quantized_weight import KINDS, JoinedWeight, LinearWeight, QuantizedWeight

__all__ = [
    "AS_IT_IS",
    "FORMATS",
    "FORMATS_WITH_ZEROS",
    "check_linear_format",
    "format_of_head",
    "format_of_packed",
    "is_cut_as_here",
    "is_kept",
    "most_packed_bytes",
    "numel_of_packed",
    "pack_weight",
    "pack_weight_into",
    "packed_bytes",
    "parts_of_packed",
]

# The ops' numbers, as in csrc/linear/packed_linear.h: of what floats are rounded to, by name,
FORMATS: dict[str, int] = {"float32": 0, "bfloat16": 1, "int8": 7, "int4": 21}
_INT8_UNROTATED = 2
_INT4_ROTATED = {32: 21, 64: 22, 128: 23}  # by the size of the groups
_INT4_UNROTATED = {32: 8, 64: 9, 128: 10}
# and of what is packed as it is: four bits with zeros, by the size of the groups, or with 8;
FORMATS_WITH_ZEROS = {32: 4, 64: 5, 128: 6}
INT4_WITH_MIDDLE = 3
# blocks of GGUF files, of which ``KINDS`` has the formats.
# In PackedHeader of csrc/linear/packed_layout.h: format, inputs, outputs.
_HEADER_BYTES = 64
_HEADER_SIZES = slice(24, 40)
_HEADER_FIELDS = (slice(4, 8), slice(24, 32), slice(32, 40))
_MAX_FORMAT = 23
#: The format of a model that keeps each weight in its format of origin.
AS_IT_IS = "file"


def check_linear_format(
    op: str, dtype: object, group_size: object = None, rotate: object = None
) -> tuple[str, int, int | None]:
    """Return the name of a format, its number in the ops, and the size of its groups."""
    name = check_format(op, dtype, FORMATS)
    number = FORMATS[name]
    if rotate is not None:
        check_bool(op, "rotate", rotate)
        if name not in ("int8", "int4"):
            raise ValueError(f"{op}: rotate is {rotate}; expected None with {name}")
    is_rotated = rotate is None or rotate
    if name == "int8" and not is_rotated:
        number = _INT8_UNROTATED
    by_size = _INT4_ROTATED if is_rotated else _INT4_UNROTATED
    if group_size is None:
        return (name, by_size[32], 32) if name == "int4" else (name, number, None)
    size = check_int(op, "group_size", group_size)
    if name != "int4":
        raise ValueError(f"{op}: group_size is {size}; expected None with {name}")
    if size not in by_size:
        raise ValueError(f"{op}: group_size is {size}; expected 32, 64 or 128")
    return name, by_size[size], size


def format_of_packed(packed: Tensor, name: str) -> tuple[int, int | None]:
    """Return the number of a packed weight's format, from its header, and its group size.

    For other bytes it is the number of the given name, and the ops refuse the weight.
    """
    if name in KINDS:
        return KINDS[name].format, KINDS[name].group_size
    of_name: dict[int, int | None] = {FORMATS[name]: None}
    if name == "int8":
        of_name[_INT8_UNROTATED] = None
    elif name == "int4":
        of_name = {INT4_WITH_MIDDLE: 32}
        for numbers in (FORMATS_WITH_ZEROS, _INT4_ROTATED, _INT4_UNROTATED):
            of_name |= {number: size for size, number in numbers.items()}
    number = FORMATS[name]
    if packed.dtype == torch.uint8 and packed.dim() == 1:
        number = int.from_bytes(bytes(packed[_HEADER_FIELDS[0]].tolist()), "little")
    if number not in of_name:
        number = FORMATS[name]
    return number, of_name[number]


def format_of_head(name: str) -> str:
    """Return the format of the output layer in a model of this format.

    Four bits would cost as much accuracy there as in all other layers, so with "int4" it is int8.
    """
    return "int8" if name == "int4" else name


def pack_weight(weight: LinearWeight, name: str) -> Tensor:
    """Return a weight as the ops take it, uint8 [bytes]: see ``pack_weight_into``."""
    with torch.inference_mode(False):
        packed = torch.empty(packed_bytes(weight, name), dtype=torch.uint8, device="cpu")
    pack_weight_into(weight, name, packed)
    return packed


def pack_weight_into(weight: LinearWeight, name: str, memory: Tensor) -> int:
    """Write a weight [out_features, in_features] to the beginning of a memory; return its bytes.

    ``name`` is the format of floats, or "file": then blocks of a GGUF file are packed unchanged,
    and floats as bfloat16 if they are bfloat16, else as float32. ``memory`` is uint8, at least
    ``packed_bytes(weight, name)`` bytes, aligned to 64 bytes.
    """
    if isinstance(weight, JoinedWeight):
        used = 0
        for part in weight.parts:
            used += pack_weight_into(part, name, memory[used:])
        return used
    size = packed_bytes(weight, name)
    number = _format_of(weight, name)
    if isinstance(weight, QuantizedWeight):
        if name == AS_IT_IS:
            ops.pack_gguf_linear(weight.data, KINDS[weight.kind].number, out=memory[:size])
            return size
        weight = weight.dequantize()
    ops.pack_linear(weight.detach().float(), number, out=memory[:size])
    return size


def packed_bytes(weight: LinearWeight, name: str) -> int:
    """Return the number of bytes of ``pack_weight``'s result."""
    if isinstance(weight, JoinedWeight):
        return sum(packed_bytes(part, name) for part in weight.parts)
    outputs, inputs = weight.shape
    return _packed_bytes((outputs, inputs), _format_of(weight, name))


def _format_of(weight: Tensor | QuantizedWeight, name: str) -> int:
    if name != AS_IT_IS:
        return FORMATS[name]
    if isinstance(weight, QuantizedWeight):
        return KINDS[weight.kind].format
    return FORMATS["bfloat16" if weight.dtype == torch.bfloat16 else "float32"]


def _packed_bytes(shape: tuple[int, int], number: int) -> int:
    """Return the bytes of a packed weight; of any format, for the fake only counts."""
    weight = torch.empty(shape, dtype=torch.float32, device="meta")
    return int(ops.pack_linear(weight, number).numel())


def is_kept(model_type: object, quantization: object) -> bool:
    """Whether quantized weights of safetensors are read as they are: the experts of gpt-oss.

    The arguments are ``model_type`` and ``quantization_config`` of the model's config.
    """
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return model_type == "gpt_oss" and method == "mxfp4"


def most_packed_bytes(shape: tuple[int, int], name: str) -> int:
    """Return an upper bound in bytes of ``pack_weight``'s result, for [out_features, in_features].

    A weight may consist of parts. Each part has a header and padded outputs.
    """
    if name == AS_IT_IS:
        number = FORMATS["float32"]
        return _packed_bytes(shape, number) + 2 * _packed_bytes((1, shape[1]), number)
    return max(_packed_bytes(shape, FORMATS[kind]) for kind in (name, format_of_head(name)))


def is_cut_as_here(memory: Tensor, at: int) -> bool:
    """Whether this process's kernels read weights that are cut as the packed one at a byte is."""
    header = memory[at : at + _HEADER_BYTES].clone()
    header[_HEADER_SIZES] = 0  # of a weight without elements, which is nothing else
    return torch.equal(ops.repack_linear(header), header)


def _header_of_packed(memory: Tensor, at: int) -> tuple[int, int, int]:
    """Return the format, inputs and outputs that a packed weight at a byte has in its header."""
    header = memory[at : at + _HEADER_BYTES].tolist()
    number, inputs, outputs = (
        int.from_bytes(bytes(header[field]), "little") for field in _HEADER_FIELDS
    )
    return number, inputs, outputs


def numel_of_packed(memory: Tensor, at: int) -> int:
    """Return how many weights there are in a packed one at a byte."""
    _, inputs, outputs = _header_of_packed(memory, at)
    return inputs * outputs


def parts_of_packed(memory: Tensor, at: int, size: int) -> list[tuple[int, int]]:
    """Return the offsets and bytes of the packed weights that fill ``size`` bytes from one on."""
    parts, end = [], at + size
    while at < end:
        number, inputs, outputs = _header_of_packed(memory, at)
        size = end - at + 1
        # A weight takes two bits at least.
        if number <= _MAX_FORMAT and 0 < outputs and inputs * outputs <= 4 * (end - at):
            size = _packed_bytes((outputs, inputs), number)
        if at < 0 or size > end - at:
            raise ValueError(f"a packed weight at byte {at} has a damaged header")
        parts.append((at, size))
        at += size
    return parts
