"""The sampling ops of Ascend CANN, aclnnTopKTopPSample and aclnnTopKTopPSampleV2, on CPU and CUDA
(emulated, not yet run on a GPU).

Names, order and meaning of the arguments are those of the CANN documentation; the work is done by
``lmdecode.top_k_top_p_sample`` in the dialects ``ascend_v1``, ``ascend_v2`` and
``ascend_v2_probabilities``. docs/reference/sampling.md has the rules in which these differ from
the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import check_int, check_layout, check_number, dtype_name, type_error
from lmdecode.sampling.ops import top_k_top_p_sample as _sample
from lmdecode.sampling.types import SampleOutput

__all__ = [
    "TopKTopPSampleOutput",
    "TopKTopPSampleV2Output",
    "top_k_top_p_sample",
    "top_k_top_p_sample_v2",
]

_MAX_K = 1024  # a larger k switches top-k off
_K_STEP = 8  # V2 rounds ksMax up to a multiple of this


class TopKTopPSampleOutput(NamedTuple):
    """Result of ``top_k_top_p_sample``.

    Attributes
    ----------
    logitsSelectIdx
        [B] int64. The chosen token.
    logitsTopKPSelect
        [B, V] float32 or None. The logits that were kept, ``-inf`` elsewhere.
    """

    logitsSelectIdx: Tensor
    logitsTopKPSelect: Tensor | None


class TopKTopPSampleV2Output(NamedTuple):
    """Result of ``top_k_top_p_sample_v2``.

    Attributes
    ----------
    logitsSelectIdx
        [B] int64 or None. The chosen token; None with ``isNeedSampleResult``.
    logitsTopKPSelect
        [B, V] float32 or None. The logits that were kept; elsewhere ``-inf``, or 0 where the inputs
        are probabilities.
    logitsIdx
        [B, V] int64 or None. The ids of the kept tokens at the front of the row, the most probable
        first, the lower id first among equals; 0 in the rest of the row.
    logitsSortMasked
        [B, V] float32 or None. The probabilities of these tokens, 0 in the rest of the row.
    """

    logitsSelectIdx: Tensor | None
    logitsTopKPSelect: Tensor | None
    logitsIdx: Tensor | None
    logitsSortMasked: Tensor | None


# --- Checks ---------------------------------------------------------------------------------------


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_tensor(
    op: str,
    name: str,
    value: Tensor,
    logits: Tensor,
    dtypes: tuple[torch.dtype, ...],
    rank: int = 1,
) -> None:
    """Check layout, dtype, shape (the first ``rank`` dimensions of the logits) and device."""
    check_layout(op, name, value)
    if value.dtype not in dtypes:
        expected = " or ".join(_name(dtype) for dtype in dtypes)
        if logits.dtype in dtypes and rank == 1:
            expected += ", the dtype of logits"
        raise ValueError(f"{op}: {name} has dtype {dtype_name(value)}; expected {expected}")
    if value.shape != logits.shape[:rank]:
        raise ValueError(
            f"{op}: {name} has shape {list(value.shape)}; expected {list(logits.shape[:rank])}"
        )
    if value.device != logits.device:
        raise ValueError(
            f"{op}: {name} is on {value.device}; expected the device of logits, {logits.device}"
        )


def _check_logits(op: str, logits: Tensor) -> None:
    if not isinstance(logits, Tensor):
        raise type_error(op, "logits", logits, "a tensor")
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"{op}: logits has dtype {dtype_name(logits)}; expected float32, float16 or bfloat16"
        )
    if logits.dim() != 2 or logits.size(1) < 1:
        raise ValueError(
            f"{op}: logits has shape {list(logits.shape)}; expected [batch, vocab], vocab >= 1"
        )


def _top_k(op: str, value: int | Tensor, logits: Tensor, limit: int = _MAX_K) -> int | Tensor:
    """``topK`` as the op takes it; a k above ``limit`` becomes 0, which switches the stage off."""
    if isinstance(value, Tensor):
        _check_tensor(op, "topK", value, logits, (torch.int32, torch.int64))
        return value if limit == _MAX_K else torch.where(value <= limit, value, 0)
    value = check_int(op, "topK", value, kind="an int or a tensor, 0 for off")
    return value if 1 <= value <= limit else 0


def _fraction(
    op: str, name: str, value: float | Tensor, logits: Tensor, off: str
) -> float | Tensor:
    """``topP`` or ``minPs`` as the op takes it; the op rounds to the dtype of the logits."""
    if isinstance(value, Tensor):
        _check_tensor(op, name, value, logits, (logits.dtype,))
        return value
    value = check_number(op, name, value, kind=f"a number or a tensor, {off}")
    if not torch.compiler.is_compiling() and value != value:
        raise ValueError(f"{op}: {name} is nan; expected a number")
    return value


def _check_rest(op: str, logits: Tensor, q: Tensor | None, eps: float, topKGuess: int) -> None:
    if q is not None:
        if not isinstance(q, Tensor):
            raise type_error(op, "q", q, "a tensor or None")
        _check_tensor(op, "q", q, logits, (torch.float32,), rank=2)
    eps = check_number(op, "eps", eps)
    if not torch.compiler.is_compiling() and not 0 <= eps < float("inf"):
        raise ValueError(f"{op}: eps is {eps}; expected a finite number >= 0")
    check_int(op, "topKGuess", topKGuess, 1, limits="an int >= 1")


def _flag(op: str, name: str, value: bool | int) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise TypeError(f"{op}: {name} is {value!r}; expected True or False")
    return bool(value)


# --- The ops --------------------------------------------------------------------------------------


def top_k_top_p_sample(
    logits: Tensor,
    topK: int | Tensor,
    topP: float | Tensor,
    q: Tensor | None = None,
    eps: float = 1e-8,
    isNeedLogits: bool = False,
    topKGuess: int = 32,
) -> TopKTopPSampleOutput:
    """Sample one token a row as aclnnTopKTopPSample does.

    Top-k keeps exactly ``topK`` logits, top-p the tokens of their softmax, in descending order, up
    to and with the one at which the sum exceeds ``topP``. Then comes the largest
    ``probability / (abs(q) + eps)``, or, without ``q``, the largest probability. Of equal values
    the lower id comes first throughout.

    Parameters
    ----------
    logits : Tensor
        ``[batch, vocab]`` float16, bfloat16 or, beyond the original, float32, any strides. The
        original also wants batch > 0 and vocab <= 2^20; here there is no such limit.
    topK : int or Tensor
        A tensor is ``[batch]`` int32, or, beyond the original, int64. Outside
        1 .. min(vocab, 1024): stage off.
    topP : float or Tensor
        A tensor is ``[batch]`` of the dtype of the logits; a number is rounded to that dtype.
        ``<= 0`` or ``>= 1``: stage off.
    q : Tensor, optional
        ``[batch, vocab]`` float32 exponential noise. Where top-k or top-p is on in a row, its
        element i belongs to the i-th token in descending order; where both are off, to token i.
    eps : float
        Added to the noise; finite, >= 0.
    isNeedLogits : bool
        Whether ``logitsTopKPSelect`` is wanted.
    topKGuess : int
        A hint to the original's search, positive. It changes nothing here.

    Returns
    -------
    TopKTopPSampleOutput
        ``(logitsSelectIdx, logitsTopKPSelect)``.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.

    Notes
    -----
    Source: documentation of aclnnTopKTopPSample in CANN. What that leaves undefined follows
    ``lmdecode.top_k_top_p_sample``: NaN counts as -inf, a logit of -inf is never kept, a row
    without any other gives index 0, and +inf logits share the whole probability.
    """
    op = "top_k_top_p_sample"
    _check_logits(op, logits)
    k = _top_k(op, topK, logits)
    p = _fraction(op, "topP", topP, logits, "1.0 for off")
    _check_rest(op, logits, q, eps, topKGuess)
    out = _sample(
        logits,
        k,
        p,
        q,
        greedy=q is None,
        eps=eps,
        return_logits=_flag(op, "isNeedLogits", isNeedLogits),
        dialect="ascend_v1",
    )
    return TopKTopPSampleOutput(out.index, out.kept_logits)


def top_k_top_p_sample_v2(
    logits: Tensor,
    topK: int | Tensor,
    topP: float | Tensor,
    q: Tensor | None = None,
    minPs: float | Tensor | None = None,
    eps: float = 1e-8,
    isNeedLogits: bool = False,
    topKGuess: int = 32,
    ksMax: int = 1024,
    inputIsLogits: bool = True,
    isNeedSampleResult: bool = False,
) -> TopKTopPSampleV2Output:
    """Sample one token a row as aclnnTopKTopPSampleV2 does.

    As ``top_k_top_p_sample``, but top-p stops at the token at which the sum reaches ``topP``, and
    ``topP <= 0`` keeps one token; then min-p keeps the probabilities of at least ``minPs`` times
    the largest.

    Parameters
    ----------
    logits : Tensor
        ``[batch, vocab]`` float16, bfloat16 or float32, any strides: logits or, with
        ``inputIsLogits=False``, probabilities, which are taken as they are.
    topK : int or Tensor
        A tensor is ``[batch]`` int32, or, beyond the original, int64. Outside
        1 .. min(vocab, ksMax): stage off.
    topP : float or Tensor
        A tensor is ``[batch]`` of the dtype of the logits; a number is rounded to that dtype.
        ``<= 0``: one token, ``>= 1``: stage off.
    q : Tensor, optional
        ``[batch, vocab]`` float32 exponential noise. Where top-k or top-p is on in a row, its
        element i belongs to the i-th token in descending order; where both are off, to token i.
    minPs : float or Tensor, optional
        As ``topP``. ``<= 0`` or None: stage off, ``>= 1``: one token.
    eps : float
        Added to the noise; finite, >= 0.
    isNeedLogits : bool
        Whether ``logitsTopKPSelect`` is wanted.
    topKGuess : int
        A hint to the original's search, positive. It changes nothing here.
    ksMax : int
        1 to 1024. The largest k, after rounding up to a multiple of 8 as the original does: with
        ``ksMax=10``, k = 16 is on and k = 17 off.
    inputIsLogits : bool
        False: the inputs are probabilities, no softmax is taken and what is filtered becomes 0.
    isNeedSampleResult : bool
        Whether ``logitsIdx`` and ``logitsSortMasked`` are wanted in place of
        ``logitsSelectIdx``; ``q`` must be None then. Takes a full sort of each row.

    Returns
    -------
    TopKTopPSampleV2Output
        ``(logitsSelectIdx, logitsTopKPSelect, logitsIdx, logitsSortMasked)``. Probabilities in
        ``logitsSortMasked`` are those of the softmax over what top-k left, or the inputs with
        ``inputIsLogits=False``; they are not normalised again after top-p and min-p. With
        ``topP <= 0`` the one kept logit has probability 1.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.

    Notes
    -----
    Source: documentation of aclnnTopKTopPSampleV2 in CANN. See ``top_k_top_p_sample`` for what that
    leaves undefined. ``logitsIdx`` is in descending order here also where top-k and top-p are both
    off, a case in which the original gives ids in ascending order.
    """
    op = "top_k_top_p_sample_v2"
    _check_logits(op, logits)
    ksMax = check_int(op, "ksMax", ksMax, 1, _MAX_K, limits=f"an int from 1 to {_MAX_K}")
    limit = (ksMax + _K_STEP - 1) // _K_STEP * _K_STEP
    k = _top_k(op, topK, logits, limit)
    p = _fraction(op, "topP", topP, logits, "1.0 for off")
    min_p = None if minPs is None else _fraction(op, "minPs", minPs, logits, "None for off")
    _check_rest(op, logits, q, eps, topKGuess)
    is_logits = _flag(op, "inputIsLogits", inputIsLogits)
    sample_result = _flag(op, "isNeedSampleResult", isNeedSampleResult)
    if sample_result and q is not None:
        raise ValueError(
            f"{op}: q and isNeedSampleResult=True were both given; expected q to be None then"
        )
    out = _sample(
        logits,
        k,
        p,
        q,
        min_p=min_p,
        greedy=q is None,
        eps=eps,
        return_logits=_flag(op, "isNeedLogits", isNeedLogits),
        dialect="ascend_v2" if is_logits else "ascend_v2_probabilities",
    )
    if not sample_result:
        return TopKTopPSampleV2Output(out.index, out.kept_logits, None, None)
    ids, values = _sorted_kept(logits, out, k, p, is_logits)
    return TopKTopPSampleV2Output(None, out.kept_logits, ids, values)


def _sorted_kept(
    logits: Tensor, out: SampleOutput, k: int | Tensor, p: float | Tensor, is_logits: bool
) -> tuple[Tensor, Tensor]:
    """Ids and probabilities of the kept tokens, [B, V] each, in order at the front of the row.

    Every stage keeps a prefix of this order, so the first ``kept_count`` tokens are the kept ones.
    """
    vocab = logits.size(1)
    x = logits.to(torch.float32)
    x = torch.where(x.isnan(), float("-inf"), x)
    values, ids = x.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    kept = rank < out.kept_count[:, None]
    if is_logits:
        # +inf logits share the whole probability.
        top = values[:, :1]
        infinite = torch.where(values == top, 0.0, float("-inf"))
        values = torch.where(top == float("inf"), infinite, values)
        k_rows = k[:, None] if isinstance(k, Tensor) else torch.full_like(ids[:, :1], k)
        k_is_on = (k_rows >= 1) & (k_rows <= min(vocab, _MAX_K))
        softmax_size = torch.where(k_is_on, k_rows, vocab)
        p_rows = torch.as_tensor(p, dtype=torch.float32, device=logits.device).to(logits.dtype)
        one = (p_rows <= 0).expand(logits.size(0))[:, None]  # rounded, as the op has it
        softmax_size = torch.where(one, 1, softmax_size)
        values = torch.where(rank < softmax_size, values, float("-inf")).softmax(dim=-1)
    return torch.where(kept, ids, 0), torch.where(kept, values, 0.0)
