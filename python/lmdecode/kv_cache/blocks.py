"""A paged KV cache: the beams of a request share blocks, which are copied on write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import Error, check_int, is_int, type_error
from lmdecode._ops import ops
from lmdecode._upload import sent

__all__ = ["BlockSlots", "BlockTable", "OutOfBlocksError", "copy_blocks_"]

_copy = ops.copy_blocks_.default
_append = ops.block_table_append_.default
_reorder = ops.block_table_reorder_.default

# Places in BlockTable.counters, as in csrc/kv_cache/block_table.h.
_FREE, _COPIES, _MISSING = 0, 1, 2
_NO_BLOCK = -1


class OutOfBlocksError(Error, RuntimeError):
    """A call needs more blocks than are free; nothing has been changed."""


class BlockSlots(NamedTuple):
    """Where the new positions of each row are to be written.

    Attributes
    ----------
    blocks, offsets
        ``[rows, num_tokens]`` int32: position j of row r goes to offset ``offsets[r, j]`` of block
        ``blocks[r, j]``, in the pools of all layers.
    copies
        ``[copies, 3]`` int32 (source, target, positions): call ``copy_blocks_`` with it before
        writing. Empty in most steps.
    """

    blocks: Tensor
    offsets: Tensor
    copies: Tensor


def copy_blocks_(pools: Sequence[Tensor], copies: Tensor) -> None:
    """Copy blocks within the pools of all layers, as ``BlockTable.append`` asks for it.

    Parameters
    ----------
    pools : sequence of Tensor
        The keys and values of all layers, a list or tuple, each ``[num_blocks, heads, block_size,
        dim]`` of any dtype and strides with a contiguous last dimension.
    copies : Tensor
        ``[copies, 3]`` int32 on the same device: the first ``positions`` of block ``target`` become
        those of block ``source``. No target may be a source or the target of another copy. On CUDA
        values are not checked: a copy out of range is skipped.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected; nothing has been written.
    """
    if not isinstance(pools, (list, tuple)):
        raise type_error("copy_blocks_", "pools", pools, "a list of tensors")
    for name, value in (("copies", copies), *((f"pools[{i}]", p) for i, p in enumerate(pools))):
        if not isinstance(value, Tensor):
            raise type_error("copy_blocks_", name, value, "a tensor")
    _copy(pools, copies)


def _check_int(name: str, value: object, lowest: int, highest: int = 2**31 - 1) -> int:
    limits = f"an int, {lowest} to {highest}"
    if not is_int(value):
        raise ValueError(f"BlockTable: {name} is {value}; expected {limits}")
    return check_int("BlockTable", name, value, lowest, highest, limits=limits)


class BlockTable:
    """Block table of a paged KV cache, whose rows share blocks.

    Position p of row r is in block ``table[r, p // block_size]``, at ``p % block_size``, of the
    pools ``[num_blocks, heads, block_size, dim]`` of all layers. A prompt's blocks are allocated
    once and shared by all beams of its request. A beam step changes only this table. A block is
    copied only if a row that shares it, as its last and partly filled block, is appended to.

    The table is on the CPU, as missing blocks must be known before anything is changed. If the
    pools are on another device, move ``table``, ``lengths`` and the result of ``append`` there.

    Parameters
    ----------
    num_blocks : int
        Number of blocks of a pool.
    max_rows : int
        Maximum number of rows: beams of all requests together.
    max_blocks_per_row : int
        Maximum length of a row, in blocks: ``max_blocks_per_row * block_size`` positions.
    block_size : int
        Number of positions of a block.

    Attributes
    ----------
    block_size
        As given.
    num_rows
        Rows in use.
    ref_counts
        ``[num_blocks]`` int32: number of rows that use each block.

    Examples
    --------
    >>> table = BlockTable(num_blocks=100, max_rows=8, max_blocks_per_row=10)
    >>> rows = table.insert(length=150, num_beams=4)  # 3 blocks, not 12
    >>> blocks, offsets = table.slots(rows[0])  # where the prompt's keys and values go
    >>> slots = table.append()  # each step: room for a token in each row
    >>> copy_blocks_(pools, slots.copies)
    >>> table.reorder_(torch.tensor([0, 0, 2, 1]))  # and the beams' choice
    """

    def __init__(
        self, num_blocks: int, max_rows: int, max_blocks_per_row: int, *, block_size: int = 64
    ) -> None:
        num_blocks = _check_int("num_blocks", num_blocks, 0)
        max_rows = _check_int("max_rows", max_rows, 0)
        max_blocks_per_row = _check_int("max_blocks_per_row", max_blocks_per_row, 0)
        block_size = _check_int("block_size", block_size, 1)
        self.block_size = block_size
        self.num_rows = 0
        # Tensors made under inference_mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._table = torch.full(
                (max_rows, max_blocks_per_row), _NO_BLOCK, dtype=torch.int32, device="cpu"
            )
            self._lengths = torch.zeros(max_rows, dtype=torch.int32, device="cpu")
            self.ref_counts = torch.zeros(num_blocks, dtype=torch.int32, device="cpu")
            # The lowest block is taken first.
            self._free_blocks = torch.arange(
                num_blocks - 1, -1, -1, dtype=torch.int32, device="cpu"
            )
            self._counters = torch.tensor([num_blocks, 0, 0], dtype=torch.int32, device="cpu")
            self._copies = torch.empty((max_rows, 3), dtype=torch.int32, device="cpu")

    def __repr__(self) -> str:
        return (
            f"BlockTable({self.num_rows} rows, {self.num_free} of {len(self.ref_counts)} blocks of "
            f"{self.block_size} free)"
        )

    @property
    def table(self) -> Tensor:
        """``[num_rows, max_blocks_per_row]`` int32, -1 after a row's last block; a view."""
        return self._table[: self.num_rows]

    @property
    def lengths(self) -> Tensor:
        """``[num_rows]`` int32: positions of each row; a view."""
        return self._lengths[: self.num_rows]

    @property
    def num_free(self) -> int:
        """Blocks that no row uses."""
        return int(self._counters[_FREE])

    def _make_room(self, what: str, first: int, end: int, num_tokens: int) -> Tensor:
        """Append to rows [first, end); return the copies."""
        tokens = torch.full((end - first,), num_tokens, device="cpu")
        rows = (self._table[first:end], self._lengths[first:end])
        copies = self._copies[first:end]
        _append(
            *rows, self.ref_counts, self._free_blocks, self._counters, copies, tokens,
            self.block_size,
        )  # fmt: skip
        _, count, missing = self._counters.tolist()
        if missing:
            raise OutOfBlocksError(
                f"BlockTable: {what} needs {self.num_free + missing} blocks and {self.num_free} "
                f"of {len(self.ref_counts)} are free; free rows, or make a larger table"
            )
        return copies[:count].clone()

    def insert(self, length: int, num_beams: int = 1) -> range:
        """Begin a request of ``length`` positions and ``num_beams`` rows, which share its blocks.

        Returns
        -------
        range
            The request's rows, which follow the existing ones.

        Raises
        ------
        OutOfBlocksError
            If there are too few free blocks; nothing has been changed.
        ValueError
            If there are too few rows, or the request is longer than a row may be.
        """
        first, max_rows = self.num_rows, len(self._lengths)
        length = _check_int("length", length, 0, self._table.shape[1] * self.block_size)
        num_beams = _check_int("num_beams", num_beams, 1)
        if first + num_beams > max_rows:
            raise ValueError(
                f"BlockTable: num_beams is {num_beams}; expected at most {max_rows - first}, with "
                f"{first} of {max_rows} rows in use"
            )
        self._make_room("insert", first, first + 1, length)
        self.num_rows = first + 1
        if num_beams > 1:
            self.reorder_(torch.tensor([*range(first), *[first] * num_beams], device="cpu"))
        return range(first, first + num_beams)

    def append(self, num_tokens: int = 1) -> BlockSlots:
        """Make room for the next positions of every row.

        Parameters
        ----------
        num_tokens : int
            Positions for each row.

        Returns
        -------
        BlockSlots
            Blocks and offsets of the new positions, and the copies to make before.

        Raises
        ------
        OutOfBlocksError
            If there are too few free blocks; nothing has been changed.
        ValueError
            If a row would become longer than it may be; nothing has been changed.
        """
        num_tokens = _check_int("num_tokens", num_tokens, 0)
        before = self.lengths[:, None].clone()
        copies = self._make_room("append", 0, self.num_rows, num_tokens)
        positions = before + torch.arange(num_tokens, dtype=torch.int32, device="cpu")
        blocks = self.table.gather(1, (positions // self.block_size).long())
        return BlockSlots(blocks, positions % self.block_size, copies)

    def slots(self, row: int, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Return blocks and offsets, [positions] int32 each, of a row's positions start to stop."""
        row = _check_int("row", row, 0, self.num_rows - 1)
        length = int(self.lengths[row])
        stop = length if stop is None else stop
        stop = _check_int("stop", stop, 0, length)
        start = _check_int("start", start, 0, stop)
        positions = torch.arange(start, stop, dtype=torch.int32, device="cpu")
        return self.table[row][positions // self.block_size], positions % self.block_size

    def reorder_(self, parents: Tensor | Sequence[int]) -> None:
        """Set row r to row ``parents[r]``; no block is copied.

        Parameters
        ----------
        parents : Tensor or sequence of int
            ``[n]`` int64 or int32, 0 to num_rows - 1: any map; n may differ from num_rows. Blocks
            that no row uses become free.
        """
        if not isinstance(parents, Tensor):
            parents = torch.tensor(list(parents), dtype=torch.int64, device="cpu")
        _reorder(
            self._table, self._lengths, self.ref_counts, self._free_blocks, self._counters,
            parents, self.num_rows, self.block_size,
        )  # fmt: skip
        self.num_rows = len(parents)

    def free(self, rows: Sequence[int]) -> None:
        """Remove rows, such as those of a request; later rows move up, in order."""
        removed = {_check_int("rows", row, 0, self.num_rows - 1) for row in rows}
        self.reorder_([row for row in range(self.num_rows) if row not in removed])

    def gather(self, pool: Tensor, length: int | None = None) -> Tensor:
        """Gather the positions of each row in order, for attention that cannot read blocks.

        Parameters
        ----------
        pool : Tensor
            ``[num_blocks, heads, block_size, dim]``.
        length : int, optional
            Number of positions; None: the longest row's.

        Returns
        -------
        Tensor
            ``[num_rows, heads, length, dim]``. Values beyond a row's length are undefined.

        Raises
        ------
        ValueError, TypeError
            If ``pool`` has other blocks than the table, or ``length`` is more than a row can have.
        """
        if not isinstance(pool, Tensor):
            raise type_error("BlockTable", "pool", pool, "a tensor")
        blocks = (len(self.ref_counts), self.block_size)
        if pool.dim() != 4 or (pool.shape[0], pool.shape[2]) != blocks:
            raise ValueError(
                f"BlockTable: pool has shape {list(pool.shape)}; expected "
                f"[{len(self.ref_counts)}, heads, {self.block_size}, dim]"
            )
        if length is None:
            length = int(self.lengths.max()) if self.num_rows else 0
        length = _check_int("length", length, 0, self.table.shape[1] * self.block_size)
        count = -(-length // self.block_size)
        numbers = sent(self.table[:, :count].clamp(min=0), pool.device)
        return pool[numbers].transpose(1, 2).flatten(2, 3)[:, :, :length]
