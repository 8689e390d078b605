"""Checks of ``BeamSearch.step``, made before it changes anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmdecode.beam.engine.plan import RunningSearch

__all__ = ["check_step"]

_OP = "BeamSearch.step"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _check_tensor(
    name: str,
    tensor: object,
    shape: tuple[int, int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    why: str = "",
) -> None:
    """Refuse what is not a tensor of this kind; a size that is a word may be any."""
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        raise TypeError(f"{_OP}: {name} is of type {kind}; expected a tensor")
    rows, columns = shape
    if (
        tensor.dim() != 2
        or tensor.shape[0] != rows
        or (isinstance(columns, int) and tensor.shape[1] != columns)
    ):
        raise ValueError(
            f"{_OP}: {name} has shape {list(tensor.shape)}; expected [{rows}, {columns}]{why}"
        )
    if tensor.dtype not in dtypes:
        dtype, *expected = (str(d).removeprefix("torch.") for d in (tensor.dtype, *dtypes))
        raise ValueError(f"{_OP}: {name} has dtype {dtype}; expected {' or '.join(expected)}")
    if tensor.device.type != device.type:
        raise ValueError(
            f"{_OP}: {name} is on {tensor.device}; expected the device of the engine, {device}"
        )


def check_step(
    running: Sequence[RunningSearch],
    vocab_size: int | None,
    device: torch.device,
    logits: object,
    attention: object,
    token_bitmask: object,
) -> None:
    """Check the arguments of ``BeamSearch.step``."""
    rows = sum(search.num_rows for search in running)
    _check_tensor(
        "logits",
        logits,
        (rows, "vocab" if vocab_size is None else vocab_size),
        _FLOATS,
        device,
        ": one row for a request that has just been inserted, then one for each beam",
    )
    assert isinstance(logits, Tensor)
    for search in running:
        if search.request.trie is not None:
            search.request.trie.check_vocab(_OP, logits.shape[1])
    if logits.shape[1] < 1:
        raise ValueError(
            f"{_OP}: logits has shape {list(logits.shape)}; expected a vocab of at least 1"
        )
    if attention is not None:
        _check_tensor("attention", attention, (rows, "source"), _FLOATS, device)
    elif any(search.request.coverage_penalty for search in running):
        raise ValueError(
            f"{_OP}: attention is None; expected [{rows}, source]: a request has a coverage_penalty"
        )
    if token_bitmask is not None:
        words = -(-logits.shape[1] // 32)
        _check_tensor("token_bitmask", token_bitmask, (rows, words), (torch.int32,), device)
