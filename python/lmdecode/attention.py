"""Attention over a sliding window of keys, its masks, and the merging of its parts."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from lmdecode import _fakes  # noqa: F401  registers the fakes
from lmdecode._library import ops
from lmdecode.attention_masks import compressed_swa_mask, expand_compressed_swa_mask, swa_mask

__all__ = [
    "compressed_swa_mask",
    "expand_compressed_swa_mask",
    "sliding_window_attention",
    "swa_mask",
]

_sliding_window_attention = ops.sliding_window_attention.default
_MAX_INT = (1 << 63) - 1
_CONVENTIONS = ("masked", "visible")


def _type_error(op: str, name: str, value: object, expected: str) -> TypeError:
    return TypeError(f"{op}: {name} is of type {type(value).__name__}; expected {expected}")


def _check_tensors(op: str, **tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise _type_error(op, name, tensor, "a tensor")


def _bound(op: str, name: str, value: int | None, least: int) -> int:
    """A window as the op takes it: -1 for none."""
    if value is None:
        return -1
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise _type_error(op, name, value, "an int or None")
    if not least <= value <= _MAX_INT:
        raise ValueError(
            f"{op}: {name} is {value}; expected an int of 64 bits, at least {least}, or None"
        )
    return value


def _number(op: str, name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _type_error(op, name, value, "a float or None")
    if not math.isfinite(value):
        raise ValueError(f"{op}: {name} is {value}; expected a finite number, or None")
    return float(value)


def _integers(op: str, name: str, value: Tensor | None, like: Tensor) -> Tensor | None:
    """int32 or int64 as contiguous int64."""
    if value is None:
        return None
    _check_tensors(op, **{name: value})
    if value.dtype not in (torch.int64, torch.int32):
        dtype = str(value.dtype).removeprefix("torch.")
        raise ValueError(f"{op}: {name} has dtype {dtype}; expected int64 or int32")
    if value.device != like.device:
        raise ValueError(
            f"{op}: {name} is on {value.device}; expected the device of q, {like.device}"
        )
    return value.to(torch.int64).contiguous()


def _per_head(op: str, name: str, value: Tensor | None) -> Tensor | None:
    """Any floating dtype as contiguous float32."""
    if value is None:
        return None
    _check_tensors(op, **{name: value})
    if not value.dtype.is_floating_point:
        dtype = str(value.dtype).removeprefix("torch.")
        raise ValueError(f"{op}: {name} has dtype {dtype}; expected a floating dtype")
    return value.to(torch.float32).contiguous()


def _positions(op: str, value: Tensor | None, q: Tensor) -> Tensor | None:
    value = _integers(op, "q_positions", value, q)
    if value is not None and q.dim() == 4 and value.dim() == 1:
        return value.expand(q.shape[0], -1)
    return value


def _mask(op: str, mask: Tensor | None) -> Tensor | None:
    """Four dimensions, the first ones of size 1 where there are fewer."""
    if mask is None:
        return None
    _check_tensors(op, attn_mask=mask)
    if not 2 <= mask.dim() <= 4:
        raise ValueError(
            f"{op}: attn_mask has shape {list(mask.shape)}; expected 2 to 4 dimensions, "
            "[batch, heads, q_tokens, kv_tokens] or the last of these"
        )
    return mask.view((1,) * (4 - mask.dim()) + mask.shape) if mask.dim() < 4 else mask


@overload
def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: object
) -> Tensor: ...
@overload
def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: object
) -> tuple[Tensor, Tensor]: ...


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    window_right: int | None = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_positions: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    attn_mask: Tensor | None = None,
    mask_convention: str = "masked",
    key_padding_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to a window of keys, without a mask: keys out of it are not even read."""
    op = "sliding_window_attention"
    _check_tensors(op, q=q, k=k, v=v)
    if mask_convention not in _CONVENTIONS:
        raise ValueError(
            f"{op}: mask_convention is {mask_convention!r}; expected 'masked' or 'visible'"
        )
    if attn_mask is not None and (window is not None or window_right != 0):
        given = "window" if window is not None else "window_right"
        raise ValueError(
            f"{op}: attn_mask was given with {given}; expected one of them: "
            "a mask alone decides what is visible"
        )
    if cu_seqlens_q is not None and cu_seqlens_kv is None:
        cu_seqlens_kv = cu_seqlens_q
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1]) if q.dim() and q.shape[-1] else 1.0
    if softcap is not None and _number(op, "softcap", softcap) <= 0:
        raise ValueError(f"{op}: softcap is {softcap}; expected more than 0, or None")
    if key_padding_mask is not None:
        _check_tensors(op, key_padding_mask=key_padding_mask)
    out, lse = _sliding_window_attention(
        q,
        k,
        v,
        _bound(op, "window", window, 1),
        _bound(op, "window_right", window_right, 0),
        _number(op, "scale", scale),
        softcap or 0.0,
        _per_head(op, "sinks", sinks),
        _per_head(op, "alibi_slopes", alibi_slopes),
        _positions(op, q_positions, q),
        _integers(op, "kv_lengths", kv_lengths, q),
        _integers(op, "cu_seqlens_q", cu_seqlens_q, q),
        _integers(op, "cu_seqlens_kv", cu_seqlens_kv, q),
        _mask(op, attn_mask),
        mask_convention == "visible",
        key_padding_mask,
        return_lse,
    )
    return (out, lse) if return_lse else out
