"""Packed memories whose record says something else."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lmdecode.models.record import own_bytes_of, read_record, record_bytes, write_record

__all__ = ["with_entries"]


def with_entries(
    memory: Tensor, changes: Mapping[str, Any], num_layers: int | None = None
) -> Tensor:
    """Return a copy of a packed memory with other entries in its record; None: without them."""
    record, own_bytes = read_record(memory), own_bytes_of(memory)
    assert own_bytes is not None
    room = record_bytes(num_layers or record["config.num_layers"])
    for name, value in changes.items():
        if value is None:
            record.pop(name, None)
        else:
            record[name] = value
    copy = memory.clone()
    write_record(copy, record, room, own_bytes)
    return copy
