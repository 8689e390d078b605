"""Drafts: proposed next tokens of a text, before a model has chosen them."""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode._checks import check_count, check_dense_tensors, check_int, dtype_name
from lmdecode._ops import ops

__all__ = ["prompt_lookup"]

_OP = "prompt_lookup"
_MOST = 1 << 24


def prompt_lookup(
    tokens: Tensor, num_tokens: int, max_ngram: int = 3, *, lengths: Tensor | None = None
) -> Tensor:
    """Propose the tokens that followed an earlier occurrence of the last n-gram of a text.

    It looks for the last ``max_ngram`` tokens in the text, then for the last ``max_ngram - 1``, and
    so on. It proposes the tokens after the earliest occurrence (Saxena 2023, prompt lookup
    decoding; ``prompt_lookup_num_tokens`` of transformers).

    Parameters
    ----------
    tokens : Tensor
        [n] or [B, n] int64 or int32 on the CPU: texts, prompt and answer.
    num_tokens : int
        Maximum number of proposed tokens, 1 to 2^24.
    max_ngram : int
        Length of the longest n-gram to look for, at least 1.
    lengths : Tensor, optional
        [B] int64 or int32, for [B, n]: number of tokens of each row's text; all by default.

    Returns
    -------
    Tensor
        [num_tokens] or [B, num_tokens] int64, -1 after the proposed tokens. Nothing is proposed if
        the last token occurs nowhere else.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """
    check_dense_tensors(_OP, tokens=tokens)
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{_OP}: tokens has dtype {dtype_name(tokens)}; expected int64 or int32")
    if tokens.dim() not in (1, 2):
        raise ValueError(
            f"{_OP}: tokens has shape {list(tokens.shape)}; expected [n] or [batch, n]"
        )
    if lengths is not None:
        check_dense_tensors(_OP, lengths=lengths)
        if lengths.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"{_OP}: lengths has dtype {dtype_name(lengths)}; expected int64 or int32"
            )
        if tokens.dim() == 1:
            raise ValueError(f"{_OP}: lengths is given; expected None for tokens of one text")
    num_tokens = check_int(_OP, "num_tokens", num_tokens, 1, _MOST, limits="1 to 2^24")
    max_ngram = check_count(_OP, "max_ngram", max_ngram)
    rows = tokens.to(torch.int64).contiguous()
    if tokens.dim() == 1:
        rows = rows[None]
    if lengths is None:
        lengths = torch.full((rows.shape[0],), rows.shape[1], device=rows.device)
    found: Tensor = ops.prompt_lookup(
        rows, lengths.to(torch.int64).contiguous(), num_tokens, max_ngram
    )
    return found[0] if tokens.dim() == 1 else found
