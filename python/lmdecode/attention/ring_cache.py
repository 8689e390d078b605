"""``RingKVCache``: the last window of keys and values, in a ring: one slot written a token."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from lmdecode._checks import (
    check_dense_tensor,
    check_dense_tensors,
    check_int,
    check_layout,
    dtype_name,
    type_error,
)
from lmdecode._ops import ops
from lmdecode.attention.ops import KeyPiece, attend_pieces
from lmdecode.kv_cache.reorder import reorder_cache_

__all__ = ["RingKVCache", "RingSnapshot", "ring_cache_append_"]

_append = ops.ring_cache_append_.default
# Default number of spare slots of a ring: the maximum number of tokens that can be rolled back, or
# of a chunk that is written before attention reads it.
_SPARE = 63


def _contiguous_vectors(states: Tensor) -> Tensor:
    return states if states.dim() == 0 or states.stride(-1) == 1 else states.contiguous()


def ring_cache_append_(
    keys: Tensor,
    values: Tensor,
    k: Tensor,
    v: Tensor,
    position: int | Tensor,
    *,
    num_sink_tokens: int = 0,
) -> None:
    """Write new keys and values to their slots of a ring, in place.

    The first ``num_sink_tokens`` positions have slots of their own, in front; every other position
    p goes to slot ``num_sink_tokens + (p - num_sink_tokens) % capacity``, where capacity is the
    number of other slots. Each token is written once; of a chunk longer than the ring, only the
    last tokens are. So the content of a ring depends on the number of tokens, not on the chunks.

    Parameters
    ----------
    keys, values : Tensor
        ``[batch, kv_heads, slots, head_size]`` and ``[..., value_size]`` of one dtype, any dtype,
        elements apart, and side by side in the last dimension.
    k, v : Tensor
        ``[batch, kv_heads, tokens, head_size]`` and ``[..., value_size]``, any strides.
    position : int or Tensor
        The position of the first of these tokens, 0 to 2^40: of all rows, or ``[batch]`` int64 or
        int32. On CUDA values are not checked: a row with a position out of range is unchanged.
    num_sink_tokens : int
        Fewer than there are slots.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected; nothing has been written.
    """
    op = "ring_cache_append_"
    check_dense_tensors(op, keys=keys, values=values, k=k, v=v)
    rows = None
    if isinstance(position, Tensor):
        check_layout(op, "position", position)
        position, rows = 0, position
    else:
        position = check_int(
            op, "position", position, kind="an int or a tensor", limits="0 to 2^40"
        )
    _append(
        keys, values, _contiguous_vectors(k), _contiguous_vectors(v), position, rows,
        check_int(op, "num_sink_tokens", num_sink_tokens),
    )  # fmt: skip


class RingOptions(TypedDict, total=False):
    """What ``RingKVCache.attend`` takes beside its tensors and ``return_lse``."""

    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    key_padding_mask: Tensor | None


class RingSnapshot(NamedTuple):
    """Snapshot of a ``RingKVCache``, as copies, from which it can resume.

    Attributes
    ----------
    num_tokens
        Number of tokens written so far.
    keys, values
        The sinks, then the last window, as ``RingKVCache.ordered`` returns them.
    """

    num_tokens: int
    keys: Tensor
    values: Tensor


class RingKVCache:
    """The keys and values of the last ``window`` tokens of each row, in a ring.

    A token is written to one slot, its position modulo ``capacity``, and is never moved. The cost
    of ``append`` does not depend on the window. ``attend`` reads the ring without a copy. Apply
    RoPE before ``append`` and ``attend``.

    Parameters
    ----------
    batch, num_kv_heads, head_size : int
        Sizes of the keys and values, ``[batch, num_kv_heads, tokens, head_size]``.
    window : int
        Number of keys that a query sees, its own included, at least 1.
    capacity : int, optional
        Slots, at least ``window``; by default ``window + 63``. ``capacity - window`` tokens can be
        rolled back.
    num_sink_tokens : int
        Number of first tokens that are never overwritten. They have their own slots, and every
        query sees them in addition to its window.
    value_size : int, optional
        Head size of the values, by default ``head_size``.
    dtype, device
        Dtype and device of the keys and values; by default torch's default dtype, and the CPU.

    Attributes
    ----------
    window, capacity, num_sink_tokens
        As given.
    num_tokens
        Tokens written so far, less those rolled back: the position of the next one.

    Examples
    --------
    >>> cache = RingKVCache(batch=1, num_kv_heads=2, head_size=64, window=256)
    >>> out = cache.attend(q, k, v)  # a prompt: attends, then writes what stays of it
    >>> out = cache.attend(q, k, v)  # and so each token, or a few
    >>> cache.rollback(3)  # the last 3 were not accepted
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_size: int,
        window: int,
        *,
        capacity: int | None = None,
        num_sink_tokens: int = 0,
        value_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        op = "RingKVCache"
        window = check_int(op, "window", window, 1)
        batch = check_int(op, "batch", batch, 0)
        num_kv_heads = check_int(op, "num_kv_heads", num_kv_heads, 0)
        head_size = check_int(op, "head_size", head_size, 0)
        value_size = head_size if value_size is None else value_size
        value_size = check_int(op, "value_size", value_size, 0)
        num_sink_tokens = check_int(op, "num_sink_tokens", num_sink_tokens, 0)
        capacity = window + _SPARE if capacity is None else capacity
        limits = f"at least {window}, the window"
        capacity = check_int(op, "capacity", capacity, window, limits=limits)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise type_error(op, "dtype", dtype, "a torch.dtype")
        self.window = window
        self.capacity = capacity
        self.num_sink_tokens = num_sink_tokens
        self.num_tokens = 0
        # First token after the sinks that is still held.
        self._first_held = num_sink_tokens
        shape = (batch, num_kv_heads, num_sink_tokens + capacity)
        # Tensors made under inference_mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._keys = torch.empty((*shape, head_size), dtype=dtype, device=device)
            self._values = torch.empty((*shape, value_size), dtype=dtype, device=device)

    def __repr__(self) -> str:
        sinks = f", {self.num_sink_tokens} sinks" if self.num_sink_tokens else ""
        return (
            f"RingKVCache({list(self._keys.shape[:2])}, window {self.window} of {self.capacity} "
            f"slots{sinks}, {self.num_tokens} tokens written)"
        )

    @property
    def batch(self) -> int:
        """Rows."""
        return self._keys.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the keys and values."""
        return self._keys.dtype

    # --- Writing

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write the next tokens of every row.

        Parameters
        ----------
        k, v : Tensor
            ``[batch, num_kv_heads, n, head_size]`` and ``[..., value_size]``, any strides, any n.
            The last ones remain.

        Raises
        ------
        ValueError, TypeError
            Names the argument, what came and what was expected; nothing has been written.
        """
        for name, states in (("k", k), ("v", v)):
            check_dense_tensor("RingKVCache", name, states)
            held = self._keys if name == "k" else self._values
            if states.dtype != held.dtype:
                raise ValueError(
                    f"RingKVCache: {name} has another dtype than the cache, "
                    f"{dtype_name(states)}; expected {dtype_name(held)}"
                )
            if states.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"RingKVCache: {name} requires a gradient, which a cache that is written in "
                    "place does not pass on; call the model under torch.no_grad()"
                )
        self._write(k, v, self.num_tokens)
        self.num_tokens += k.shape[2]
        self._first_held = max(self._first_held, self.num_tokens - self.capacity)

    def _write(self, k: Tensor, v: Tensor, position: int) -> None:
        _append(
            self._keys, self._values, _contiguous_vectors(k), _contiguous_vectors(v), position,
            None, self.num_sink_tokens,
        )  # fmt: skip

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens, as if they had not been written.

        Parameters
        ----------
        num_tokens : int
            0 to ``capacity - window``, counted from the sequence's maximum length so far: later
            tokens overwrote the slots of tokens that the window would need. Any number while
            the ring has overwritten nothing.

        Raises
        ------
        ValueError
            The ring no longer holds the window; nothing has been changed.
        """
        if isinstance(num_tokens, Tensor):  # nothing waits for a device to know it
            raise type_error("rollback", "num_tokens", num_tokens, "an int")
        num_tokens = check_int("rollback", "num_tokens", num_tokens, 0, self.num_tokens)
        if self._window_start(self.num_tokens - num_tokens) < self._first_held:
            most = self.num_tokens - self.window - self._first_held
            raise ValueError(
                f"rollback: num_tokens is {num_tokens}; expected at most {most}: what the window "
                f"needs before them has been overwritten in the {self.capacity} slots; make a ring "
                "of a larger capacity, or restore a snapshot"
            )
        self.num_tokens -= num_tokens

    def _window_start(self, position: int) -> int:
        """Where the window of the query before ``position`` begins."""
        return max(self.num_sink_tokens, position - self.window)

    def reset(self) -> None:
        """Forget everything."""
        self.num_tokens = 0
        self._first_held = self.num_sink_tokens

    def snapshot(self) -> RingSnapshot:
        """Copy the sinks and the last window, from which ``restore`` resumes."""
        return RingSnapshot(self.num_tokens, *self.ordered())

    def restore(self, snapshot: RingSnapshot) -> None:
        """Resume from a snapshot of this cache, or of one with the same sizes and window.

        Only tokens that are appended after it can be rolled back. The first token of the window,
        which the next query does not see, need not be in the snapshot.

        Raises
        ------
        ValueError
            The snapshot does not fit; nothing has been changed.
        TypeError
            It is not a ``RingSnapshot``.
        """
        if not isinstance(snapshot, RingSnapshot):
            raise type_error("restore", "snapshot", snapshot, "a RingSnapshot")
        total, keys, values = snapshot
        total = check_int("restore", "num_tokens", total, 0, 1 << 40, limits="0 to 2^40")
        sinks = min(total, self.num_sink_tokens)
        held = min(total - sinks, self.window)
        if isinstance(keys, Tensor) and keys.dim() == 4 and keys.shape[2] == sinks + held - 1:
            held = min(held, self.window - 1)
        for name, states, ring in (("keys", keys, self._keys), ("values", values, self._values)):
            shape = [*ring.shape[:2], sinks + held, ring.shape[3]]
            if list(states.shape) != shape or states.dtype != ring.dtype:
                raise ValueError(
                    f"restore: {name} of the snapshot are {states.dtype} {list(states.shape)}; "
                    f"expected {ring.dtype} {shape}"
                )
        keys, values = keys.to(self._keys.device), values.to(self._keys.device)
        self._write(keys[:, :, :sinks], values[:, :, :sinks], 0)
        self._write(keys[:, :, sinks:], values[:, :, sinks:], total - held)
        self.num_tokens = total
        self._first_held = max(self.num_sink_tokens, total - held)

    # --- Rows

    def _slots_in_use(self) -> int:
        return min(self.num_tokens, self._keys.shape[2])

    def reorder_(self, rows: Tensor) -> None:
        """Set row r to row ``rows[r]``, in place: ``[batch]`` int64 or int32, any map."""
        check_dense_tensors("RingKVCache.reorder_", rows=rows)
        reorder_cache_([self._keys, self._values], rows, length_dim=2, length=self._slots_in_use())

    def select_rows_(self, rows: Tensor) -> None:
        """Set row r to the former row ``rows[r]``, for any number of rows, in new memory."""
        used = self._slots_in_use()
        with torch.inference_mode(False):
            for name in ("_keys", "_values"):
                before = getattr(self, name)
                after = before.new_empty((len(rows), *before.shape[1:]))
                after[:, :, :used] = before[:, :, :used].index_select(0, rows.to(before.device))
                setattr(self, name, after)

    # --- Reading

    def ordered(self, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Copy the keys and values in the order of their positions.

        Parameters
        ----------
        length : int, optional
            Maximum number of held tokens after the sinks; by default ``window``.

        Returns
        -------
        tuple of Tensor
            ``[batch, num_kv_heads, held, head_size]`` and ``[..., value_size]``: the sinks, then
            the last tokens.
        """
        length = self.window if length is None else length
        length = check_int("ordered", "length", length, 0, self.capacity)
        first = max(self._first_held, self.num_tokens - length)
        pieces = self._pieces(first) or [self._piece(0, 0, 0)]
        return (
            torch.cat([piece.keys for piece in pieces], dim=2),
            torch.cat([piece.values for piece in pieces], dim=2),
        )

    @property
    def keys(self) -> Tensor:
        """A copy of the keys in order, see ``ordered``."""
        return self.ordered()[0]

    @property
    def values(self) -> Tensor:
        """A copy of the values in order, see ``ordered``."""
        return self.ordered()[1]

    def _pieces(self, first: int) -> list[KeyPiece]:
        """Views of the sinks, where there are, and of the tokens from ``first`` on: up to 3."""
        total, sinks = self.num_tokens, min(self.num_tokens, self.num_sink_tokens)
        pieces = [self._piece(0, 0, sinks, is_pinned=True)] if sinks else []
        while first < total:
            slot = (first - self.num_sink_tokens) % self.capacity
            end = min(total, first + self.capacity - slot)
            pieces.append(self._piece(self.num_sink_tokens + slot, first, end))
            first = end
        return pieces

    def _piece(self, slot: int, begin: int, end: int, *, is_pinned: bool = False) -> KeyPiece:
        keys = self._keys.narrow(2, slot, end - begin)
        values = self._values.narrow(2, slot, end - begin)
        return KeyPiece(keys, values, ((begin, end),), is_pinned)

    def _all_in_one_piece(self, first: int) -> KeyPiece | None:
        """The sinks and the tokens from ``first`` on, if they are all that the slots hold.

        They are in the order of the slots, which has no effect for one query.
        """
        total, sinks = self.num_tokens, self.num_sink_tokens
        if first == sinks and 0 < total <= sinks + self.capacity:
            return self._piece(0, 0, total)
        if total - first != self.capacity:
            return None
        wrap = total - (total - sinks) % self.capacity  # is in the first slot after the sinks
        ranges = ((0, sinks), (wrap, total), (first, wrap))
        return KeyPiece(self._keys, self._values, ranges)

    def fits(self, num_tokens: int) -> bool:
        """Return whether the next ``num_tokens`` can be written before attention reads them."""
        first = self._window_start(self.num_tokens + 1)
        return first >= self.num_tokens + num_tokens - self.capacity

    @overload
    def attend(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[RingOptions],
    ) -> Tensor: ...

    @overload
    def attend(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        return_lse: Literal[True],
        **options: Unpack[RingOptions],
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def attend(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        return_lse: bool,
        **options: Unpack[RingOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...

    def attend(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend to the window of each query, and write new tokens, without a copy of the ring.

        New tokens that do not fit beside the window are written after attention to them. If keys
        are in several pieces, such as at both ends of the ring, attention runs over each piece, and
        ``merge_attention_states`` merges the results.

        Parameters
        ----------
        q : Tensor
            ``[batch, q_heads, tokens, head_size]`` float32, float16 or bfloat16: the queries of the
            last ``tokens`` tokens, new ones included.
        k, v : Tensor, optional
            New tokens, as for ``append``. Without them the queries belong to written tokens.
        scale, softcap, sinks, alibi_slopes, return_lse
            As of ``sliding_window_attention``. ``sinks`` are scores, not the tokens of
            ``num_sink_tokens``.
        key_padding_mask : Tensor, optional
            ``[batch, tokens so far]`` bool, the new ones included. False hides a token.

        Returns
        -------
        Tensor or tuple of Tensor
            As of ``sliding_window_attention``.

        Raises
        ------
        ValueError, TypeError
            Names the argument, what came and what was expected; new tokens are not counted as
            written.
        """
        chunk = self._check_chunk(q, k, v)
        before, end = self.num_tokens, self.num_tokens + (chunk[0].shape[2] if chunk else 0)
        first = self._check_queries(q, end)
        self._check_mask(key_padding_mask, end)
        try:
            write_first = first >= end - self.capacity
            if chunk and write_first:
                self.append(*chunk)
            whole = None
            if q.shape[2] == 1 and alibi_slopes is None and (write_first or not chunk):
                whole = self._all_in_one_piece(first)
            pieces = [whole] if whole else self._pieces(first)
            if chunk and not write_first:
                pieces += self._pieces_of_chunk(*chunk)
            pieces = pieces or [self._piece(0, 0, 0)]
            out = attend_pieces(
                q, pieces, self.window, end - q.shape[2], scale=scale, softcap=softcap,
                alibi_slopes=alibi_slopes, sinks=sinks, key_padding_mask=key_padding_mask,
                return_lse=return_lse,
            )  # fmt: skip
        except (TypeError, ValueError):
            self.num_tokens = before
            raise
        if chunk and not write_first:
            self.append(*chunk)
        return out

    def _pieces_of_chunk(self, k: Tensor, v: Tensor) -> list[KeyPiece]:
        begin, end = self.num_tokens, self.num_tokens + k.shape[2]
        middle = min(max(self.num_sink_tokens, begin), end)
        return [
            KeyPiece(
                k[:, :, lo - begin : hi - begin], v[:, :, lo - begin : hi - begin], ((lo, hi),),
                is_pinned,
            )
            for lo, hi, is_pinned in ((begin, middle, True), (middle, end, False))
            if lo < hi
        ]  # fmt: skip

    def _check_chunk(
        self, q: Tensor, k: Tensor | None, v: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        check_dense_tensor("attend", "q", q)
        if k is None and v is None:
            chunk = None
        else:
            for name, states in (("k", k), ("v", v)):
                check_dense_tensor("attend", name, states)
            assert k is not None and v is not None
            chunk = (k, v)
        for name, states in (("q", q), *(zip(("k", "v"), chunk, strict=True) if chunk else ())):
            if states.dim() != 4:
                raise ValueError(
                    f"attend: {name} has shape {list(states.shape)}; expected "
                    "[batch, heads, tokens, head_size]"
                )
        return chunk

    def _check_queries(self, q: Tensor, end: int) -> int:
        """Return where the window of the first query begins."""
        queries = q.shape[2]
        if queries > end:
            raise ValueError(f"attend: q has {queries} tokens; expected at most {end}, those held")
        first = self._window_start(end - queries + 1)
        if first < self._first_held:
            most = max(0, end - self._first_held - self.window + 1)
            raise ValueError(
                f"attend: q has {queries} tokens; expected at most {most}: what the windows of "
                f"earlier ones need has been overwritten in the {self.capacity} slots"
            )
        return first

    def _check_mask(self, mask: Tensor | None, end: int) -> None:
        if mask is None:
            return
        check_dense_tensor("attend", "key_padding_mask", mask)
        if list(mask.shape) != [self.batch, end]:
            raise ValueError(
                f"attend: key_padding_mask has shape {list(mask.shape)}; expected "
                f"[{self.batch}, {end}], a column for each token so far"
            )
