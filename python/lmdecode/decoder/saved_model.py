"""Packed weights of a decoder-only model in a folder: written once, mapped by every process.

The folder holds ``lmdecode.json``, which says what the model is, and the file of weights that it
names. The weights are in the order that a processor reads them: they are mapped as they are.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmdecode._memory import bytes_of
from lmdecode._ops import ops
from lmdecode.decoder.causal_config import CausalConfig
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.config import FORMATS
from lmdecode.decoder.huge_memory import new_memory

__all__ = ["MANIFEST", "load_packed", "save_packed"]

MANIFEST = "lmdecode.json"
_VERSION = 1
_HEADER_BYTES = 24  # of a packed weight: what it is, and the tile that it is cut into


def _tile(weight_format: str) -> str:
    """Return how this process cuts weights of a format: those cut otherwise are of no use to it."""
    packed = ops.pack_linear(torch.zeros(1, 1), FORMATS[weight_format])
    return bytes(packed[:_HEADER_BYTES].tolist()).hex()


def _replace(path: Path, data: Any) -> None:
    """Write a file whole, or leave what was there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _weights_before(folder: Path) -> str | None:
    """Return the file of weights that a folder's manifest names, None where it is not known."""
    try:
        name = json.loads((folder / MANIFEST).read_text())["weights"]["file"]
    except (OSError, KeyError, TypeError, ValueError):
        return None
    is_ours = isinstance(name, str) and re.fullmatch(r"weights-[0-9a-f]{8}\.bin", name)
    return name if is_ours else None


def save_packed(folder: Path, model: PackedCausalModel, **more: Any) -> None:
    """Write a model's weights to a folder, which is made; one that is there is replaced.

    One writer at a time. No file goes but the weights that the manifest before named.

    Parameters
    ----------
    folder, model
        Where, and what.
    **more
        Kept beside, to be returned by ``load_packed``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    memory = bytes_of(model.memory)
    crc = zlib.crc32(memory)
    name, before = f"weights-{crc:08x}.bin", _weights_before(folder)
    _replace(folder / name, memory)
    manifest = {
        "version": _VERSION,
        "config": dataclasses.asdict(model.config),
        "weight_format": model.weight_format,
        "tile": _tile(model.weight_format),
        "sizes": model.sizes,
        "numbers": model.numbers,
        "layout": model.layout.tolist(),
        "weights": {"file": name, "bytes": len(memory), "crc32": crc},
        **more,
    }
    _replace(folder / MANIFEST, json.dumps(manifest).encode())
    if before not in (None, name):
        (folder / str(before)).unlink(missing_ok=True)


def _bad(folder: Path, what: str) -> ValueError:
    return ValueError(f"Decoding.load: {folder} {what}; expected a folder that Decoding.save wrote")


def _packed_again(model: PackedCausalModel) -> Tensor:
    """Return a model's weights in the order of this process's kernels; sizes are the same."""
    memory = new_memory(model.memory.numel())
    memory.copy_(model.memory)
    for at, size in model.packed_parts():
        memory[at : at + size].copy_(ops.repack_linear(model.memory[at : at + size]))
    return memory


def load_packed(folder: Path, *, verify: bool = False) -> tuple[PackedCausalModel, dict[str, Any]]:
    """Return the model of a folder, its weights mapped, and what was kept beside.

    Raises
    ------
    FileNotFoundError
        The folder has no manifest.
    ValueError
        It is damaged, or of another version.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, weights = manifest["version"], manifest["weights"]
        if version == _VERSION:
            config = dict(manifest["config"])
            for name in ("windows", "rotary", "rotary_scales"):
                config[name] = tuple(config[name])
            model = PackedCausalModel.of_packed(
                CausalConfig(**config),
                manifest["weight_format"],
                [int(size) for size in manifest["sizes"]],
                [float(number) for number in manifest["numbers"]],
                torch.tensor(manifest["layout"], dtype=torch.int64),
            )
        path, size = folder / str(weights["file"]), int(weights["bytes"])
        crc, tile = int(weights["crc32"]), manifest["tile"]
    except FileNotFoundError:
        raise FileNotFoundError(
            f"Decoding.load: {folder} has no {MANIFEST}; expected a folder that Decoding.save wrote"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(folder, f"has a damaged {MANIFEST} ({error})") from error
    if version != _VERSION:
        raise _bad(folder, f"is of version {version}, this is version {_VERSION}")
    if not path.is_file() or path.stat().st_size != size:
        have = f"{path.stat().st_size} bytes" if path.is_file() else "nothing"
        raise _bad(folder, f"has {have} in {path.name} instead of {size} bytes")
    model.memory = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    if verify and zlib.crc32(bytes_of(model.memory)) != crc:
        raise _bad(folder, f"has other bytes in {path.name} than were written")
    if tile != _tile(model.weight_format):
        warnings.warn(
            f"Decoding.load: {folder} was packed for another kind of processor: its weights are "
            "packed again, in memory of this process; save the model to have them mapped",
            stacklevel=3,
        )
        model.memory = _packed_again(model)
    return model, manifest
