"""Digests of cases, and the cases in which two records differ."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.digests.kinds import kinds_of

__all__ = ["RANGE", "case_digest", "differences", "digest_of", "joined", "kind_of"]

#: Cases that are named together.
RANGE = 50
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _leaves(value: Any) -> Iterator[Tensor | str]:
    """Yield the tensors among values, and all else as text that tells how they are nested."""
    if isinstance(value, Tensor):
        yield value
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield repr(value)
    elif isinstance(value, dict):
        yield from _leaves(list(value.items()))
    elif isinstance(value, (list, tuple)):
        yield f"{len(value)} values"
        for item in value:
            yield from _leaves(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _leaves({name: getattr(value, name) for name in value.__dataclass_fields__})
    else:
        raise TypeError(f"a case gave a {type(value)}; expected tensors, numbers and text")


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def digest_of(parts: Iterable[Any]) -> str:
    """Return 16 hexadecimal digits of all bits, shapes and dtypes.

    Where there is NaN, "/" and 16 more follow, of the same with each NaN as one.
    """
    exact, numbers, has_nan = hashlib.sha256(), hashlib.sha256(), False
    for part in parts:
        for leaf in _leaves(part):
            if isinstance(leaf, str):
                kinds_of_bytes = [leaf.encode()] * 2
            else:
                head = f"{leaf.dtype} {list(leaf.shape)}\0".encode()
                kinds_of_bytes = [head + _bytes(leaf)] * 2
                if leaf.dtype in _FLOATS and (is_nan := leaf.isnan()).any():
                    has_nan = True
                    kinds_of_bytes[1] = head + _bytes(leaf.masked_fill(is_nan, torch.nan))
            for digest, data in zip((exact, numbers), kinds_of_bytes, strict=True):
                digest.update(f"{len(data)}\0".encode() + data)
    digits = [digest.hexdigest()[:16] for digest in (exact, numbers)]
    return "/".join(digits if has_nan else digits[:1])


def kind_of(area: str, number: int) -> str:
    """Return the kind of a case of an area."""
    kinds = kinds_of(area)
    often = [weight for weight, _ in kinds.values()]
    return random.Random(f"{area} {number}").choices(list(kinds), often)[0]


def case_digest(area: str, number: int) -> str:
    """Return the digest of one case, which is the same whatever ran before."""
    kind = kind_of(area, number)
    _, make = kinds_of(area)[kind]
    torch.manual_seed(number)
    try:
        return digest_of(make(random.Random(f"{kind} {number}"), number))
    except Exception as error:
        error.add_note(f"in case {number} of {area}: {kind}")
        raise


def joined(digests: Sequence[str]) -> str:
    """Return one digest of those of cases."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def differences(area: str, level: str, before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return a line for each range of cases in which some differ, as far as both lists go."""
    pairs, lines = list(zip(before, now, strict=False)), []
    for first in range(0, len(pairs), RANGE):
        found = []
        for number, (old, new) in enumerate(pairs[first : first + RANGE], start=first):
            if old != new:
                is_nan = "/" in old and old.partition("/")[2] == new.partition("/")[2]
                found.append(f"{number} ({kind_of(area, number)}{'; NaN alone' * is_nan})")
        if found:
            last = min(first + RANGE, len(pairs)) - 1
            lines.append(f"{area}, {level}, cases {first} to {last}: {', '.join(found)}")
    return lines
