"""Drafts: tokens that ``prompt_lookup`` proposes, and those that ``verify_draft`` accepts."""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode._checks import (
    check_choice,
    check_count,
    check_dense_tensors,
    check_int,
    dtype_name,
    type_error,
)
from lmdecode._ops import ops
from lmdecode.sampling.sampler import Sampler
from lmdecode.sampling.types import VerifyOutput

__all__ = ["prompt_lookup", "verify_draft"]

_LOOKUP, _VERIFY = "prompt_lookup", "verify_draft"
_MODES = ("match", "rejection")
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
    check_dense_tensors(_LOOKUP, tokens=tokens)
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{_LOOKUP}: tokens has dtype {dtype_name(tokens)}; expected int64 or int32"
        )
    if tokens.dim() not in (1, 2):
        raise ValueError(
            f"{_LOOKUP}: tokens has shape {list(tokens.shape)}; expected [n] or [batch, n]"
        )
    if lengths is not None:
        check_dense_tensors(_LOOKUP, lengths=lengths)
        if lengths.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"{_LOOKUP}: lengths has dtype {dtype_name(lengths)}; expected int64 or int32"
            )
        if tokens.dim() == 1:
            raise ValueError(f"{_LOOKUP}: lengths is given; expected None for tokens of one text")
    num_tokens = check_int(_LOOKUP, "num_tokens", num_tokens, 1, _MOST, limits="1 to 2^24")
    max_ngram = check_count(_LOOKUP, "max_ngram", max_ngram)
    rows = tokens.to(torch.int64).contiguous()
    if tokens.dim() == 1:
        rows = rows[None]
    if lengths is None:
        lengths = torch.full((rows.shape[0],), rows.shape[1], device=rows.device)
    found: Tensor = ops.prompt_lookup(
        rows, lengths.to(torch.int64).contiguous(), num_tokens, max_ngram
    )
    return found[0] if tokens.dim() == 1 else found


def verify_draft(
    logits: Tensor,
    draft: Tensor,
    sampler: Sampler,
    *,
    mode: str = "match",
    draft_logits: Tensor | None = None,
    num_draft: Tensor | None = None,
    parents: Tensor | None = None,
    bitmask: Tensor | None = None,
) -> VerifyOutput:
    """Accept drafted tokens, and choose the token after them.

    A model reads a draft of D tokens at once. By its logits, the sampler accepts the tokens that it
    would have chosen one by one.

    Parameters
    ----------
    logits
        [B, D + 1, V] float32, float16 or bfloat16: row 0 after the text, row i + 1 after drafted
        token i.
    draft
        [B, D] int64 or int32. A number outside the vocabulary is never accepted.
    sampler
        The sampler. The accepted tokens and the next one are appended to its sequences.
    mode
        "match": a token is accepted if the sampler draws the same one. The text is then bitwise
        the same as without drafts, given equal logits. "rejection": a token is accepted with the
        probability min(1, p / q), where p is the sampler's distribution and q the draft's; else a
        token is drawn from (p - q)+ (arXiv 2211.17192). The text has the same distribution as
        without drafts, and more tokens are accepted.
    draft_logits
        [B, D, V] float32, for "rejection": q is their softmax. None: q is 1 at the drafted token.
    num_draft
        [B] int64: number of valid tokens of ``draft``. None: all.
    parents
        [B, D] int64, for "match": the draft is a tree. The place in ``draft`` of each token's
        parent, which comes before it; -1: the text. The longest accepted path counts.
    bitmask
        [B, D + 1, ceil(V / 32)] int32: as of ``Sampler.sample``, for each row of ``logits``.

    Returns
    -------
    VerifyOutput

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected; nothing has changed.
    """
    if not isinstance(sampler, Sampler):
        raise type_error(_VERIFY, "sampler", sampler, "a lmdecode.Sampler")
    check_choice(_VERIFY, "mode", mode, _MODES)
    check_dense_tensors(_VERIFY, logits=logits, draft=draft)
    if bitmask is not None:
        check_dense_tensors(_VERIFY, bitmask=bitmask)
    if draft.dtype not in (torch.int64, torch.int32) or draft.dim() != 2:
        raise ValueError(
            f"{_VERIFY}: draft has dtype {dtype_name(draft)} and shape {list(draft.shape)}; "
            f"expected int64 or int32, [batch, drafts]"
        )
    options = {"draft_logits": draft_logits, "num_draft": num_draft, "parents": parents}
    plain = {name: value for name, value in options.items() if value is not None}
    check_dense_tensors(_VERIFY, **plain)
    plain = {name: value.contiguous() for name, value in plain.items()}
    tokens, path, num_accepted, status = sampler._verify(
        logits.detach(),
        bitmask,
        draft.to(torch.int64).contiguous(),
        plain.get("parents"),
        plain.get("num_draft"),
        plain.get("draft_logits"),
        mode == "rejection",
    )
    return VerifyOutput(num_accepted, tokens, status, path)
