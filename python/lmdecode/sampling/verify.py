"""``verify_draft``: the tokens of a draft that a ``Sampler`` accepts."""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode._checks import check_choice, check_dense_tensors, dtype_name, type_error
from lmdecode.sampling.sampler import Sampler
from lmdecode.sampling.types import VerifyOutput

__all__ = ["verify_draft"]

_OP = "verify_draft"
_MODES = ("match", "rejection")


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
        raise type_error(_OP, "sampler", sampler, "a lmdecode.Sampler")
    check_choice(_OP, "mode", mode, _MODES)
    check_dense_tensors(_OP, logits=logits, draft=draft)
    if bitmask is not None:
        check_dense_tensors(_OP, bitmask=bitmask)
    if draft.dtype not in (torch.int64, torch.int32) or draft.dim() != 2:
        raise ValueError(
            f"{_OP}: draft has dtype {dtype_name(draft)} and shape {list(draft.shape)}; expected "
            f"int64 or int32, [batch, drafts]"
        )
    options = {"draft_logits": draft_logits, "num_draft": num_draft, "parents": parents}
    plain = {name: value for name, value in options.items() if value is not None}
    check_dense_tensors(_OP, **plain)
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
