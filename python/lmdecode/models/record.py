"""The record at the head of packed weights: what the model is and where its parts are, by name.

It is text, a line for each entry: its name, and its value as JSON. ``config.*`` are the fields of
the config, ``weights.*`` the place of each part in the memory, [offset, bytes]. A switch that is
off has no entry. csrc/bindings/model_record.h reads it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from lmdecode._memory import bytes_of

__all__ = [
    "as_float32", "config_entries", "config_of", "own_bytes_of", "places_of", "read_record",
    "record_bytes", "record_text", "write_record",
]  # fmt: skip

_HEAD = struct.Struct("<8sIIQQ32x")  # magic, version, CRC-32 and bytes of the text, of the memory
_MAGIC, _VERSION = b"lmdmodel", 1
_ROOM = 4096  # bytes of text, for a layer and for what is not of a layer
_JSON = json.JSONEncoder(default=operator.index)  # integers of numpy are integers, too
_Config = TypeVar("_Config")


def record_bytes(num_layers: int) -> int:
    """Return the bytes at the head of a memory that hold any record of so many layers."""
    return _ROOM * (1 + num_layers)


def config_entries(config: Any, prefix: str = "config.") -> dict[str, Any]:
    """Return the fields of a config as entries of a record; None has none, nor what is off.

    So a model's record, and the hash of it, stay what they are when a switch is added. Fields of a
    config within it follow its name and a dot. The mixers of a model are equal: they are one,
    ``mixer``, and ``mixer.layers`` says which layers have it.
    """
    entries: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "mixers":
            has_mixer = [mixer is not None for mixer in value]
            if any(has_mixer):
                mixer = value[has_mixer.index(True)]
                entries |= config_entries(mixer, f"{prefix}mixer.")
                entries[f"{prefix}mixer.layers"] = has_mixer
        elif dataclasses.is_dataclass(value):
            entries |= config_entries(value, f"{prefix}{field.name}.")
        elif value is not None and not _is_off(field, value):
            entries[prefix + field.name] = value
    return entries


def _is_off(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether a field has its default, which is 0, False, no limit, or that in each layer."""
    if isinstance(value, tuple):
        return field.default == () and all(entry is None or entry is False for entry in value)
    return value == field.default and (not value or value == math.inf)


def config_of(of: type[_Config], record: Mapping[str, Any]) -> _Config:
    """Return the config whose fields a record has; raises ValueError or TypeError for others."""
    fields: dict[str, Any] = {}
    for name, value in record.items():
        path = name.split(".")
        if path[0] != "config":
            continue
        at = fields
        for step in path[1:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = tuple(value) if isinstance(value, list) else value
    if mixer := fields.pop("mixer", None):
        layers = mixer.pop("layers")
        fields["mixers"] = tuple(mixer if has_mixer else None for has_mixer in layers)
    return of(**fields)


def as_float32(value: Any) -> Any:
    """Return an entry with its floats rounded to float32."""
    if isinstance(value, list | tuple):
        return [as_float32(entry) for entry in value]
    return struct.unpack("f", struct.pack("f", value))[0] if isinstance(value, float) else value


def record_text(record: Mapping[str, Any]) -> bytes:
    """Return the text of a record."""
    values = map(_JSON.encode, record.values())
    return "".join(f"{name} {value}\n" for name, value in zip(record, values, strict=True)).encode()


def write_record(memory: Tensor, record: Mapping[str, Any], room: int, own_bytes: int) -> None:
    """Write a record to the first ``room`` bytes of a memory, of which ``own_bytes`` are its own.

    The bytes behind it are set to 0. Raises ValueError if there is no room for it.
    """
    text = record_text(record)
    head = _HEAD.pack(_MAGIC, _VERSION, zlib.crc32(text), len(text), own_bytes)
    if (size := len(head) + len(text)) > room:
        raise ValueError(f"Decoding: the record of a model takes {size} bytes; expected {room}")
    memory[:size] = torch.frombuffer(bytearray(head + text), dtype=torch.uint8)
    memory[size:room] = 0


def own_bytes_of(memory: Tensor) -> int | None:
    """Return the bytes of the model whose record a memory begins with; None: there is none."""
    head = bytes_of(memory[: _HEAD.size])
    if len(head) < _HEAD.size or bytes(head[: len(_MAGIC)]) != _MAGIC:
        return None
    return int(_HEAD.unpack(head)[-1])


def read_record(memory: Tensor) -> dict[str, Any]:
    """Return the record of a memory; raises ValueError for other bytes.

    The ops check its entries.
    """
    if own_bytes_of(memory) is None:
        raise ValueError(f"Decoding: weights have no record in {len(memory)} bytes")
    _, version, crc, text_bytes, own_bytes = _HEAD.unpack(bytes_of(memory[: _HEAD.size]))
    if version != _VERSION:
        raise ValueError(
            f"Decoding: weights have a record of version {version}, this is {_VERSION}: pack the "
            "model again"
        )
    if own_bytes > len(memory) or text_bytes > own_bytes - _HEAD.size:
        raise ValueError(
            f"Decoding: weights have {len(memory)} bytes; expected {own_bytes}, as the record says"
        )
    text = bytes(bytes_of(memory[_HEAD.size : _HEAD.size + text_bytes]))
    if zlib.crc32(text) != crc:
        raise ValueError("Decoding: weights have a record with another checksum than its text")
    lines = [line.partition(" ") for line in text.decode("ascii").splitlines()]
    values = json.loads(f"[{','.join(value for _, _, value in lines)}]")
    return dict(zip((name for name, _, _ in lines), values, strict=True))


def places_of(record: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield of each part its name, as in ``layers.0.qkv``, its offset and its bytes."""
    for name, value in record.items():
        if name.startswith("weights."):
            offset, size = value
            yield name.removeprefix("weights."), offset, size
