"""Bytes of a ``model.bin``, written here: as CTranslate2 writes them, or with a lie in them."""

import struct
from collections.abc import Mapping
from typing import Any

import torch

DTYPES = [torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16]


def text(word: str) -> bytes:
    data = word.encode()
    return struct.pack("<H", len(data) + 1) + data + b"\0"


def variable(
    name: str,
    value: torch.Tensor,
    *,
    version: int = 6,
    shape: Any = None,
    kind: int | None = None,
    size: int | None = None,
) -> bytes:
    """Return one of the file's, with another shape, dtype (before version 4: its bytes) or size."""
    shape = list(value.shape) if shape is None else shape
    data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    if kind is None:
        kind = DTYPES.index(value.dtype) if version >= 4 else value.itemsize
    if size is None:
        size = len(data) if version >= 4 else value.numel()
    head = struct.pack(f"<B{len(shape)}IBI", len(shape), *shape, kind, size)
    return text(name) + head + data


def model_file(
    variables: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str] | None = None,
    *,
    version: int = 6,
    spec: str = "TransformerSpec",
    count: int | None = None,
) -> bytes:
    """Return all of a file."""
    parts = [struct.pack("<I", version)]
    if version >= 2:
        parts += [text(spec), struct.pack("<I", 7)]
    parts.append(struct.pack("<I", len(variables) if count is None else count))
    parts += [variable(name, value, version=version) for name, value in variables.items()]
    if version >= 3:
        aliases = {} if aliases is None else aliases
        parts.append(struct.pack("<I", len(aliases)))
        parts += [text(alias) + text(name) for alias, name in aliases.items()]
    return b"".join(parts)
