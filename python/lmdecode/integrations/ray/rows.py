"""Columns of a batch of Ray Data, and the seeds of its rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lmdecode._checks import MAX_INT, is_int, type_error

__all__ = ["Batch", "audio_of", "output_of", "row_seeds", "texts_of", "values_of"]

#: What ``map_batches`` gives a class, and takes from it.
Batch = dict[str, Any]

_RATE = 16_000
_OUTPUTS = ("text", "tokens")


def values_of(op: str, batch: Any, name: str) -> list[Any]:
    """Return a column's values, a row each.

    Raises TypeError where the batch is no mapping of columns, and ValueError where the column is
    missing or one that is to be written exists.
    """
    if not isinstance(batch, Mapping):
        raise type_error(op, "the batch", batch, 'a dict of columns, as of batch_format="numpy"')
    if name not in batch:
        columns = ", ".join(map(repr, batch))
        raise ValueError(f"{op}: the columns are {columns}; expected one of the name {name!r}")
    for output in _OUTPUTS:
        if output in batch:
            raise ValueError(
                f"{op}: there is a column {output!r}, which is to be written; expected none: "
                "Dataset.rename_columns gives it another name"
            )
    return list(batch[name])


def texts_of(op: str, batch: Any, name: str) -> list[str]:
    """Return a column of texts; raises as ``values_of`` does, TypeError for what is no text."""
    texts = values_of(op, batch, name)
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise type_error(op, f"column {name!r}, row {row} of the batch,", text, "a str")
    return [str(text) for text in texts]


def audio_of(op: str, batch: Any, name: str) -> list[np.ndarray]:
    """Return a column of sounds, [samples] float32 each, at 16 kHz.

    Raises as ``values_of``, and names the row that is no such sound.
    """
    sounds = []
    for row, value in enumerate(values_of(op, batch, name)):
        where = f"column {name!r}, row {row} of the batch,"
        if isinstance(value, Mapping):
            rate = value.get("sampling_rate")
            if rate != _RATE:
                raise ValueError(f"{op}: {where} has sampling_rate {rate!r}; expected {_RATE}")
            value = value.get("array")
        if not isinstance(value, (np.ndarray, Sequence)) or isinstance(value, (str, bytes)):
            raise type_error(op, where, value, f"an array [samples] of floats at {_RATE} Hz")
        sound = np.asarray(value)
        if sound.ndim != 1 or not np.issubdtype(sound.dtype, np.floating):
            raise ValueError(
                f"{op}: {where} has shape {list(sound.shape)} and dtype {sound.dtype}; expected "
                f"[samples] of floats at {_RATE} Hz"
            )
        if sound.size == 0 or not np.isfinite(sound).all():
            raise ValueError(f"{op}: {where} is empty or not finite; expected samples")
        sounds.append(sound.astype(np.float32))
    return sounds


def row_seeds(op: str, seed: int, batch: Mapping[str, Any], contents: Sequence[bytes]) -> list[int]:
    """Return a seed of 63 bits for each row, from the job's seed and the row's id or content.

    The batch's column "id" has ints or texts; without it the row's ``contents`` count. A seed does
    not depend on how rows lie in batches. Raises TypeError for an id that is neither int nor str.
    """
    keys = [b"content:" + content for content in contents]
    if "id" in batch:
        keys = []
        for row, value in enumerate(batch["id"]):
            if not is_int(value) and not isinstance(value, str):
                where = f"column 'id', row {row} of the batch,"
                raise type_error(op, where, value, "an int or str")
            kind, text = ("text", value) if isinstance(value, str) else ("int", str(int(value)))
            keys.append(f"{kind}:{text}".encode(errors="surrogatepass"))
    salt = seed.to_bytes(8, "little")
    digests = (hashlib.blake2b(key, digest_size=8, key=salt).digest() for key in keys)
    return [int.from_bytes(digest, "little") & MAX_INT for digest in digests]


def output_of(batch: Mapping[str, Any], texts: list[str], tokens: list[list[int]]) -> Batch:
    """Return a batch with its columns "text" and "tokens" besides.

    Tokens are lists, which Ray keeps as lists of int64 whatever their lengths.
    """
    column = np.empty(len(texts), dtype=object)
    column[:] = texts
    return {**batch, "text": column, "tokens": tokens}
