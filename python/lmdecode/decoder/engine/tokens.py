"""Token ids from any kind of sequence."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from torch import Tensor

from lmdecode._checks import is_int, type_error

__all__ = ["tokens_of"]


def tokens_of(op: str, name: str, tokens: Any, vocab: int | None = None) -> tuple[int, ...]:
    """Return the tokens of an int, a sequence, a set, or a tensor or array of one dimension."""
    if isinstance(tokens, Tensor) or (hasattr(tokens, "__array__") and hasattr(tokens, "tolist")):
        if len(tokens.shape) > 1 or "int" not in str(tokens.dtype):
            raise ValueError(
                f"{op}: {name} has shape {list(tokens.shape)} and dtype {tokens.dtype}; expected "
                "[length] of integers"
            )
        tokens = tokens.tolist()
    if is_int(tokens):
        tokens = (tokens,)
    is_text = isinstance(tokens, (str, bytes, bytearray, memoryview))
    if is_text or not isinstance(tokens, (Sequence, Set)):
        raise type_error(op, name, tokens, "a sequence of int, or a tensor")
    for token in tokens:
        if not is_int(token):
            raise type_error(op, f"a token of {name}", token, "an int")
        if vocab is not None and not 0 <= token < vocab:
            raise ValueError(f"{op}: {name} has the token {token}; expected 0 to {vocab - 1}")
    return tuple(int(token) for token in tokens)
