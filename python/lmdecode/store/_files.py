"""Files beside the compiled store's: what a directory is for, and how an exported file begins."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from lmdecode._checks import type_error
from lmdecode.store.fingerprint import Fingerprint

_EXPORT_MAGIC = b"LMDKVEXP"


def describe(directory: Path, fingerprint: Fingerprint) -> None:
    """Say in readable form what a directory is for; the index has the same."""
    _replace(directory / "fingerprint.json", fingerprint.encoded())


def _replace(path: Path, content: bytes) -> None:
    if path.exists() and path.read_bytes() == content:
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # others may write it too
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


_MODEL_FIELDS = ("mark", "model_name", "revision")


def read_model(directory: Path) -> dict[str, str | None]:
    """Return the fields of ``model.json``; None for each that is missing, as in old stores."""
    try:
        content = json.loads((directory / "model.json").read_bytes())
    except (OSError, ValueError):
        content = {}
    if not isinstance(content, dict):
        content = {}
    known = {name: content.get(name) for name in _MODEL_FIELDS}
    return {k: value if isinstance(value, str) else None for k, value in known.items()}


def write_model(directory: Path, known: dict[str, str | None]) -> None:
    """Say in readable form which model a directory is of."""
    _replace(directory / "model.json", json.dumps(known, sort_keys=True).encode())


@dataclass(frozen=True)
class ExportHead:
    """Header of an exported file."""

    fingerprint: Fingerprint
    chunk_tokens: int
    by_column: bool


def checked_path(op: str, name: str, path: object) -> Path:
    """Return a path; raise TypeError or ValueError for what is none, before anything is opened."""
    if not isinstance(path, (str, os.PathLike)):  # a number would be an open file's
        raise type_error(op, name, path, "a path")
    if "\0" in os.fspath(path):
        raise ValueError(f"{op}: {name} is {path!r}; expected a path without a null byte")
    return Path(path)


def read_export_head(path: str | os.PathLike[str]) -> ExportHead | None:
    """Return the header of a file that ``export`` wrote; None for any other file."""
    with open(path, "rb") as file:
        head = file.read(20)
        size = int.from_bytes(head[12:20], "little")
        if head[:8] != _EXPORT_MAGIC or size > 1 << 20:
            return None
        try:
            fingerprint = Fingerprint.decoded(file.read(size))
        except (ValueError, TypeError):
            return None
        numbers = file.read(8)
        return ExportHead(
            fingerprint, int.from_bytes(numbers[:4], "little"), numbers[4:] != bytes(4)
        )
