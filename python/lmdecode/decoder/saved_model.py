"""Packed weights of a decoder-only model in a folder: written once, mapped by every process.

The folder holds ``lmdecode.json``, which says what the model is, and the files that it names: the
weights, and what transformers knows of the model. The weights are in the order that a processor
reads them: they are mapped as they are.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
import zlib
from collections.abc import Mapping
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
_CONFIGS = ("config.json", "generation_config.json")
_HEADER_BYTES = 24  # of a packed weight: what it is, and the tile that it is cut into


def _tile(weight_format: str) -> str:
    """Return how this process cuts weights of a format: those cut otherwise are of no use to it."""
    packed = ops.pack_linear(torch.zeros(1, 1), FORMATS[weight_format])
    return bytes(packed[:_HEADER_BYTES].tolist()).hex()


def _write(folder: Path, files: Mapping[str, Any]) -> None:
    """Write files, all of them or none; the last one, the manifest, when the others are there."""
    temporaries = {name: folder / f".{name}.{os.getpid()}" for name in files}
    try:
        for name, data in files.items():
            with open(temporaries[name], "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        # While names change hands there is no model, rather than one of another one's parts.
        (folder / MANIFEST).unlink(missing_ok=True)
        for name, temporary in temporaries.items():
            os.replace(temporary, folder / name)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def _files_before(folder: Path) -> set[str]:
    """Return the files that the save before made, none where its manifest cannot be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        names = [name for name, is_made in manifest["files"].items() if is_made]
        names.append(manifest["weights"]["file"])
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return set()
    return {name for name in names if isinstance(name, str) and Path(name).name == name}


def save_packed(
    folder: Path, model: PackedCausalModel, files: Mapping[str, bytes], **more: Any
) -> None:
    """Write a model to a folder, which is made; one that is there is replaced.

    One writer at a time. Of the model that is replaced the files go that were made for it.

    Parameters
    ----------
    folder, model
        Where, and what.
    files
        Beside the weights, by their names; the manifest names them.
    **more
        Kept in the manifest, to be returned by ``load_packed``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    memory = bytes_of(model.memory)
    crc = zlib.crc32(memory)
    name, before = f"weights-{crc:08x}.bin", _files_before(folder)
    manifest = {
        "version": _VERSION,
        "config": dataclasses.asdict(model.config),
        "weight_format": model.weight_format,
        "tile": _tile(model.weight_format),
        "sizes": model.sizes,
        "numbers": model.numbers,
        "layout": model.layout.tolist(),
        "weights": {"file": name, "bytes": len(memory), "crc32": crc},
        # Whether this or a save before made it: what was there is the user's, and stays.
        "files": {file: file in before or not (folder / file).exists() for file in files},
        **more,
    }
    written = {name: memory, **files, MANIFEST: json.dumps(manifest).encode()}
    _write(folder, written)
    for other in before - written.keys():
        (folder / other).unlink(missing_ok=True)


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
        configs = [name for name in _CONFIGS if name in manifest["files"]]
    except FileNotFoundError:
        raise FileNotFoundError(
            f"Decoding.load: {folder} has no {MANIFEST}; expected a folder that Decoding.save wrote"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(folder, f"has a damaged {MANIFEST} ({error})") from error
    if version != _VERSION:
        raise _bad(folder, f"is of version {version}, this is version {_VERSION}")
    for name in configs:
        if not (folder / name).is_file():
            raise _bad(folder, f"has no {name}, which its {MANIFEST} names")
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
