"""Beam search ops: the best continuations of each request's beams."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmdecode import _fakes  # noqa: F401  registers the fakes
from lmdecode._library import ops
from lmdecode.beam_types import BeamCandidates

__all__ = ["BeamCandidates", "log_softmax_top_k"]

_OP = "log_softmax_top_k"
_log_softmax_top_k = ops.log_softmax_top_k.default
_MAX_INT = (1 << 63) - 1


def _type_error(name: str, value: object, expected: str) -> TypeError:
    return TypeError(f"{_OP}: {name} is of type {type(value).__name__}; expected {expected}")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise _type_error(name, value, "an int")
    if not 1 <= value <= _MAX_INT:
        raise ValueError(f"{_OP}: {name} is {value}; expected an int of 64 bits, at least 1")


def _row_offsets(num_beams: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """[requests + 1] int64: where the rows of each request begin, and where the last ends."""
    if isinstance(num_beams, Tensor):
        if num_beams.dtype not in (torch.int64, torch.int32):
            dtype = str(num_beams.dtype).removeprefix("torch.")
            raise ValueError(f"{_OP}: num_beams has dtype {dtype}; expected int64 or int32")
        if num_beams.dim() != 1:
            raise ValueError(
                f"{_OP}: num_beams has shape {list(num_beams.shape)}; expected [requests]"
            )
        if num_beams.device != device:
            raise ValueError(
                f"{_OP}: num_beams is on {num_beams.device}; "
                f"expected the device of logits, {device}"
            )
        ends = num_beams.cumsum(0, dtype=torch.int64)
        return torch.cat((ends.new_zeros(1), ends))
    offsets = [0]
    for beams in num_beams:
        _check_count("num_beams", beams)
        offsets.append(offsets[-1] + beams)
    if offsets[-1] > _MAX_INT:
        raise ValueError(
            f"{_OP}: num_beams has a sum of {offsets[-1]}; expected the rows of logits"
        )
    return torch.tensor(offsets, dtype=torch.int64, device=device)


def log_softmax_top_k(
    logits: Tensor,
    beam_scores: Tensor,
    num_candidates: int,
    *,
    num_beams: int | Sequence[int] | Tensor,
) -> BeamCandidates:
    """Find the best continuations of each request's beams, without writing their log-softmax.

    A candidate is a beam of the request and a token, its score
    ``log_softmax(logits[row])[token] + beam_scores[row]``. Candidates stand in the order "score
    descending, then beam, then token": what ``topk`` of the flat [num_beams * vocab] scores gives,
    the lowest index first at ties. Scores are one fixed sequence of f32 and f64 operations
    on an exact integer sum: a result depends on nothing but the request's rows, not on the batch,
    the thread count or the CPU's vector width (CUDA: the same by design, emulated, not yet run on a
    GPU).

    Parameters
    ----------
    logits : Tensor
        ``[rows, vocab]`` float32, float16 or bfloat16, any strides; rows >= 0, vocab >= 1. A row
        with logits of +inf shares the probability evenly among these.
    beam_scores : Tensor
        ``[rows]``, or ``[requests, num_beams]`` for an int ``num_beams``, float32: the sums of
        log-probabilities so far. A beam of score -inf takes no part, its logits are not looked at.
    num_candidates : int
        Candidates of a request, at least 1. Beam search takes ``max(2, 1 + number of end tokens) *
        num_beams``.
    num_beams : int, sequence of int or Tensor
        Rows of each request, at least 1: for all requests, or one for each, as int64 or int32 where
        it is a tensor, on the device of the logits. The rows of a request are neighbours, in the
        order of the requests. A CUDA tensor is not looked at before the launch: a request that it
        gives no rows has status 2.

    Returns
    -------
    BeamCandidates
        ``scores`` float32, ``tokens`` int64 and ``beams`` int64, each [requests, num_candidates];
        where a request has fewer candidates above -inf: -inf, 0 and 0. ``status`` [requests]
        uint8: bit 0 a logit was NaN, bit 1 a row had no logit above -inf or every beam score was
        -inf, bit 2 a beam score was NaN or +inf; a request with a status has no candidates.
        ``log_probs`` float32 [requests, num_candidates]: of the tokens alone, the scores without
        those of the beams; -inf where there is no candidate.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """
    if not isinstance(logits, Tensor):
        raise _type_error("logits", logits, "a tensor")
    if not isinstance(beam_scores, Tensor):
        raise _type_error("beam_scores", beam_scores, "a tensor")
    _check_count("num_candidates", num_candidates)
    if isinstance(num_beams, (int, torch.SymInt)):
        _check_count("num_beams", num_beams)
        if beam_scores.dim() == 2:
            if beam_scores.shape[1] != num_beams:
                raise ValueError(
                    f"{_OP}: beam_scores has shape {list(beam_scores.shape)}; "
                    f"expected [rows] or [requests, {num_beams}]"
                )
            beam_scores = beam_scores.reshape(-1)
        return BeamCandidates(
            *_log_softmax_top_k(logits, beam_scores, num_candidates, num_beams, None)
        )
    if not isinstance(num_beams, (Tensor, Sequence)) or isinstance(num_beams, (str, bytes)):
        raise _type_error("num_beams", num_beams, "an int, a sequence of ints or a tensor")
    offsets = _row_offsets(num_beams, logits.device)
    return BeamCandidates(*_log_softmax_top_k(logits, beam_scores, num_candidates, 1, offsets))
