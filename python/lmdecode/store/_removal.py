"""Removing the whole store of one fingerprint, its files overwritten."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from lmdecode.store.errors import StoreLockedError

_LOCK = "lock"
_NAMED_LAST = ("model.json", "fingerprint.json")  # until then it can be removed by its name
_BLOCK = 1 << 20


def remove_store(directory: Path) -> None:
    """Overwrite the files of a fingerprint's directory, and remove it.

    Raises
    ------
    StoreLockedError
        Something writes it.
    OSError
        A file cannot be overwritten or removed; the call can be repeated.
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
