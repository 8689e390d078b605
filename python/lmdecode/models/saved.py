"""Packed weights of a model in a folder: written once, mapped by every process.

The folder holds ``lmdecode.json``, which says what the model is, and the files that it names: the
weights, and what transformers knows of the model. The weights are in the order that a processor
reads them: they are mapped as they are.
"""

from __future__ import annotations

import json
import math
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmdecode._memory import bytes_of
from lmdecode._ops import ops
from lmdecode.linear import PackedLinear
from lmdecode.linear.formats import is_cut_as_here
from lmdecode.models.huge_memory import ALIGNMENT, new_memory
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.packed_stack import PackedDecoder, PackedEncoder

__all__ = [
    "MANIFEST", "PackedEncoderDecoder", "check_unchanged", "damaged", "damaged_configs",
    "load_packed", "save_packed",
]  # fmt: skip

Part = PackedDecoder | PackedEncoder | PackedLinear

_DTYPES = {"float32": torch.float32, "uint8": torch.uint8}  # uint8: of packed weights
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _tensors_of(part: Part) -> list[Tensor]:
    if isinstance(part, PackedLinear):
        return [
            part.packed,
            torch.empty(0, dtype=torch.float32, device="cpu") if part.bias is None else part.bias,
        ]
    return [part.embedding, part.memory]


_STACKS: dict[str, type[PackedDecoder] | type[PackedEncoder]] = {
    "decoder": PackedDecoder,
    "encoder": PackedEncoder,
}


class PackedEncoderDecoder:
    """Packed parts of an encoder-decoder model, to save or as loaded.

    ``parts`` has the "decoder", optionally the "encoder", and linear layers by other names, all of
    one format.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = dict(parts)
        self._linear: dict[str, tuple[Tensor, Tensor, Mapping[str, int]]] = {}
        # Dtype, shape and offset of each tensor; tensors that parts share are stored once.
        self._places: dict[str, list[tuple[str, list[int], int]]] = {}
        size, places = 0, dict[tuple[int, torch.dtype, int], int]()
        for name, part in self.parts.items():
            entries = self._places[name] = []
            for tensor in _tensors_of(part):
                key = (tensor.data_ptr(), tensor.dtype, tensor.numel())
                at = places.get(key, size) if tensor.numel() else 0
                if tensor.numel() and key not in places:
                    places[key] = at
                    size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
                entries.append((_NAMES[tensor.dtype], list(tensor.shape), at))

    @classmethod
    def of_memory(cls, memory: Tensor, facts: Mapping[str, Any]) -> PackedEncoderDecoder:
        """See ``PackedCausalModel.of_memory``."""
        model = cls.__new__(cls)
        model.parts, model._places, model._linear = {}, {}, {}
        for name, of in facts["places"].items():
            tensors = []
            for dtype, shape, at in of:
                if dtype not in _DTYPES or min(shape, default=0) < 0 or at < 0 or at % ALIGNMENT:
                    raise ValueError(
                        f"a tensor of {name} is {dtype} {shape} at {at}; expected float32 or "
                        f"uint8, sizes, and a multiple of {ALIGNMENT}"
                    )
                size = math.prod(shape) * _DTYPES[dtype].itemsize
                tensors.append(memory[at : at + size].view(_DTYPES[dtype]).view(shape))
            first, second = tensors
            if name in _STACKS:
                model.parts[name] = _STACKS[name].of_memory(first, second)
            else:
                model._linear[name] = (first, second, facts["sizes"][name])
            model._places[name] = of
        if "decoder" not in model.parts:
            raise ValueError(f"parts are {', '.join(model.parts)}; expected a decoder")
        return model

    @property
    def weight_format(self) -> str:
        """The decoder's format."""
        return self.parts["decoder"].weight_format  # type: ignore[union-attr]

    def check(self) -> None:
        """Add the linear layers; raises ValueError where the ops refuse any weights."""
        for name, (packed, bias, sizes) in self._linear.items():
            self.parts[name] = PackedLinear.from_packed(
                packed, bias if bias.numel() else None, dtype=self.weight_format, **sizes
            )
        for part in self.parts.values():
            if isinstance(part, PackedDecoder | PackedEncoder):
                part.check()

    def buffers(self) -> Iterator[Tensor]:
        """Yield the memory in consecutive parts."""
        at = 0
        for name, of in self._places.items():
            for tensor, (_, _, begin) in zip(_tensors_of(self.parts[name]), of, strict=True):
                if tensor.numel() and begin == at:
                    yield tensor
                    padding = -tensor.nbytes % ALIGNMENT
                    yield torch.zeros(padding, dtype=torch.uint8, device="cpu")
                    at += tensor.nbytes + padding

    def facts(self) -> dict[str, Any]:
        """Return what describes the memory, beside the records in it."""
        sizes = {
            name: {"in_features": part.in_features, "out_features": part.out_features}
            for name, part in self.parts.items()
            if isinstance(part, PackedLinear)
        }
        return {"places": self._places, "sizes": sizes}

    def first_packed(self) -> int:
        """Return where a packed weight begins in the memory."""
        return self.packed_parts()[0][0]

    def packed_parts(self) -> list[tuple[int, int]]:
        """Return where each packed weight begins in the memory, and its bytes."""
        parts = []
        for name, ((_, shape, first), (_, _, second)) in self._places.items():
            part = self.parts.get(name)
            if isinstance(part, PackedDecoder | PackedEncoder):
                parts += [(second + at, size) for at, size in part.packed_parts()]
            else:
                parts.append((first, math.prod(shape)))
        return parts


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
        "weight_format": model.weight_format,
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
