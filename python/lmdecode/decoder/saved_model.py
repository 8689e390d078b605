"""Packed weights of a model in a folder: written once, mapped by every process.

The folder holds ``lmdecode.json``, which says what the model is, and the files that it names: the
weights, and what transformers knows of the model. The weights are in the order that a processor
reads them: they are mapped as they are.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmdecode._memory import bytes_of
from lmdecode._ops import ops
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.encoder_decoder import PackedEncoderDecoder
from lmdecode.decoder.huge_memory import new_memory
from lmdecode.linear.formats import is_cut_as_here

__all__ = [
    "MANIFEST", "check_unchanged", "damaged", "damaged_configs", "load_packed", "save_packed",
]  # fmt: skip

MANIFEST = "lmdecode.json"
_VERSION = 5
# Errors of reading a manifest that has facts of other types, or infinite numbers.
_ERRORS_OF_FACTS = (
    AttributeError,
    LookupError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
_CONFIGS = ("config.json", "generation_config.json")
PackedModel = PackedCausalModel | PackedEncoderDecoder
_KINDS: dict[str, type[PackedModel]] = {
    "causal": PackedCausalModel,
    "encoder_decoder": PackedEncoderDecoder,
}


def _write(folder: Path, files: Mapping[str, Iterable[Any]]) -> None:
    """Write files, all of them or none; the last one, the manifest, when the others are there.

    Each file is the concatenation of its parts.
    """
    temporaries = {name: folder / f".{name}.{os.getpid()}" for name in files}
    try:
        for name, parts in files.items():
            with open(temporaries[name], "wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
        # While names change hands there is no model, rather than one of another one's parts.
        (folder / MANIFEST).unlink(missing_ok=True)
        for name, temporary in temporaries.items():
            os.replace(temporary, folder / name)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def damaged(folder: Path, what: str) -> ValueError:
    """Return the error that says what a folder has, or is, which ``save_packed`` did not write."""
    return ValueError(f"Decoding.load: {folder} {what}; expected a folder that Decoding.save wrote")


def damaged_configs(folder: Path, error: Exception) -> ValueError:
    """Return the error that says that transformers cannot take a folder's configs."""
    what = "has a damaged config.json or generation_config.json, or another model's"
    return damaged(folder, f"{what} ({error})")


def _checksum(manifest: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a manifest without its checksum."""
    others = {name: value for name, value in manifest.items() if name != "crc32"}
    return zlib.crc32(json.dumps(others, sort_keys=True).encode())


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder, as it was written; raise for what ``load_packed`` does."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        version, crc = manifest["version"], manifest.get("crc32")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"Decoding.load: {folder} has no {MANIFEST}; expected a folder that Decoding.save wrote"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(folder, f"has a damaged {MANIFEST} ({error})") from error
    if version != _VERSION:
        raise damaged(folder, f"is of version {version}, this is version {_VERSION}: pack it again")
    if crc != (expected := _checksum(manifest)):
        raise damaged(folder, f"has a damaged {MANIFEST} (its checksum is {crc}, not {expected})")
    return manifest


def _files_before(folder: Path) -> set[str]:
    """Return the files that the save before made, none where its manifest cannot be read."""
    try:
        manifest = _read_manifest(folder)
    except (OSError, ValueError):
        return set()
    names = [name for name, is_made in manifest["files"].items() if is_made]
    names.append(manifest["weights"]["file"])
    return {name for name in names if Path(name).name == name}


def save_packed(folder: Path, model: PackedModel, files: Mapping[str, bytes], **more: Any) -> None:
    """Write a model to a folder, created if missing; a model in it is replaced, with its files.

    One writer at a time. ``files``, beside the weights, are by name; the manifest lists them and
    keeps ``more``, which ``load_packed`` returns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    memory = [bytes_of(buffer) for buffer in model.buffers()]
    crc = 0
    for buffer in memory:
        crc = zlib.crc32(buffer, crc)
    name, before = f"weights-{crc:08x}.bin", _files_before(folder)
    manifest: dict[str, Any] = {
        "version": _VERSION,
        "kind": next(kind for kind, of in _KINDS.items() if isinstance(model, of)),
        "facts": model.facts(),
        "weights": {"file": name, "bytes": sum(map(len, memory)), "crc32": crc},
        # Whether this or an earlier save made it: the user's own files stay.
        "files": {file: file in before or not (folder / file).exists() for file in files},
        **more,
    }
    manifest["crc32"] = _checksum(manifest)
    files = {**files, MANIFEST: json.dumps(manifest).encode()}
    written: dict[str, Iterable[Any]] = {name: memory}
    written |= {file: [data] for file, data in files.items()}
    _write(folder, written)
    for other in before - written.keys():
        (folder / other).unlink(missing_ok=True)


def _packed_again(model: PackedModel, memory: Tensor) -> Tensor:
    """Return a model's weights in the order of this process's kernels; sizes are the same."""
    again = new_memory(memory.numel())
    again.copy_(memory)
    for at, size in model.packed_parts():
        again[at : at + size].copy_(ops.repack_linear(memory[at : at + size]))
    return again


def load_packed(folder: Path, *, verify: bool = False) -> tuple[PackedModel, dict[str, Any]]:
    """Return a folder's model, with mapped weights, and the further entries of its manifest.

    Raises FileNotFoundError without a manifest, ValueError if it is damaged or of another version.
    """
    manifest = _read_manifest(folder)
    try:
        weights, kind, facts = manifest["weights"], _KINDS[manifest["kind"]], manifest["facts"]
        path, size, crc = folder / weights["file"], int(weights["bytes"]), int(weights["crc32"])
        configs = [name for name in _CONFIGS if name in manifest["files"]]
    except _ERRORS_OF_FACTS as error:
        raise damaged(folder, f"has a damaged {MANIFEST} ({error})") from error
    for name in configs:
        if not (folder / name).is_file():
            raise damaged(folder, f"has no {name}, which its {MANIFEST} names")
    if not path.is_file() or path.stat().st_size != size:
        have = f"{path.stat().st_size} bytes" if path.is_file() else "nothing"
        raise damaged(folder, f"has {have} in {path.name} instead of {size} bytes")
    memory = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    if verify and zlib.crc32(bytes_of(memory)) != crc:
        raise damaged(folder, f"has other bytes in {path.name} than were written")
    try:
        model = kind.of_memory(memory, facts)
        is_own = is_cut_as_here(memory, model.first_packed())
        if not is_own:
            model = kind.of_memory(_packed_again(model, memory), facts)
        model.check()
    except _ERRORS_OF_FACTS as error:
        raise damaged(folder, f"has other weights than its {MANIFEST} says ({error})") from error
    if is_own and isinstance(model, PackedCausalModel):
        model.saved_hash = manifest.get("weights_hash")
    if not is_own:
        warnings.warn(
            f"Decoding.load: {folder} was packed for another kind of processor: its weights are "
            "packed again, in memory of this process; save the model to have them mapped",
            stacklevel=3,
        )
    return model, manifest


def check_unchanged(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise what ``load_packed`` does where another model has come since: files may be its own."""
    if _read_manifest(folder) != manifest:
        raise damaged(folder, "was written again while it was read")
