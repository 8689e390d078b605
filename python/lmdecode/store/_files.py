"""Files beside the compiled store's: what a directory is for, exported files, and removal."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path

from lmdecode._checks import type_error
from lmdecode.store.errors import StoreLockedError
from lmdecode.store.fingerprint import Fingerprint

_EXPORT_MAGIC = b"LMDKVEXP"


def describe(directory: Path, fingerprint: Fingerprint) -> None:
    """Write a readable description of a directory's purpose; the index has the same."""
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
    """Return a checked path; raises TypeError or ValueError before anything is opened."""
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


_LOCK = "lock"
_NAMED_LAST = ("model.json", "fingerprint.json")  # until then it can be removed by its name
_BLOCK = 1 << 20


def remove_store(directory: Path) -> None:
    """Overwrite the files of a fingerprint's directory, and remove it.

    Raises StoreLockedError while it has a writer, and OSError where a file cannot be overwritten or
    removed; the call can be repeated.
    """
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreLockedError(f"rm: {directory} has a writer; close it first") from None
        names = sorted(os.listdir(directory))  # the index first: nothing refers to slots then
        for name in [*(n for n in names if n not in _NAMED_LAST), *_NAMED_LAST]:
            if name != _LOCK and name in names:
                _overwrite(directory / name)
                (directory / name).unlink()
        (directory / _LOCK).unlink()
        directory.rmdir()
        parent = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
    finally:
        os.close(descriptor)


def _overwrite(path: Path) -> None:
    """Put zeros where a file has bytes; holes have none."""
    if path.is_symlink() or path.name.endswith("-shm"):  # readers map it; it has no content
        return
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        end = 0
        while (begin := _seek(descriptor, end, os.SEEK_DATA)) is not None:
            end = _seek(descriptor, begin, os.SEEK_HOLE) or begin
            for offset in range(begin, end, _BLOCK):
                os.pwrite(descriptor, bytes(min(_BLOCK, end - offset)), offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seek(descriptor: int, offset: int, whence: int) -> int | None:
    try:
        return os.lseek(descriptor, offset, whence)
    except OSError as error:
        if error.errno != errno.ENXIO:  # there is no more
            raise
        return None
