"""Beam indirection: attention reads the cache through an index, and a beam step moves no K or V."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmdecode._checks import check_dense_tensors, check_int, check_layout, is_int
from lmdecode._ops import ops
from lmdecode._upload import uploaded

__all__ = ["BeamIndirection", "gather_indirect", "update_beam_indirection_"]

_update = ops.update_beam_indirection_.default


def update_beam_indirection_(indirection: Tensor, parents: Tensor, length: int | Tensor) -> None:
    """Reorder the index of a cache by the beams, in place, without moving keys or values.

    Entry (row, position) is the cache row that holds the keys and values of that position. For
    positions below its length, row r becomes the former row ``parents[r]``. The entry at the length
    becomes r, the cache row that the row's next token is written to.

    Parameters
    ----------
    indirection : Tensor
        ``[rows, capacity]`` int32, with contiguous positions.
    parents : Tensor
        ``[rows]`` int64 or int32 on the same device: the row that each row continues, any map. On
        CUDA values are not checked: a row with a parent or length out of range is unchanged.
    length : int or Tensor
        Positions in use, 0 to capacity: one number for all rows, or ``[rows]`` int64 or int32. At
        capacity there is no next slot, and no entry is written for it.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected; nothing has been written.
    """
    op = "update_beam_indirection_"
    check_dense_tensors(op, indirection=indirection)
    check_dense_tensors(op, parents=parents)
    if isinstance(length, Tensor):
        check_layout(op, "length", length)
        _update(indirection, parents, 0, length)
        return
    _update(indirection, parents, check_int(op, "length", length, kind="an int or a tensor"), None)


def gather_indirect(states: Tensor, indirection: Tensor, length: int | None = None) -> Tensor:
    """Gather the keys or values that each row sees through an index, in order of positions.

    For attention that cannot read through the index itself.

    Parameters
    ----------
    states : Tensor
        ``[rows, heads, capacity, dim]``.
    indirection : Tensor
        ``[rows, capacity]`` int32, see ``update_beam_indirection_``.
    length : int, optional
        Positions to copy; None: all.

    Returns
    -------
    Tensor
        ``[rows, heads, length, dim]``: element (r, h, p) is that of row ``indirection[r, p]``.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """
    check_dense_tensors("gather_indirect", states=states)
    check_dense_tensors("gather_indirect", indirection=indirection)
    if states.dim() != 4:
        raise ValueError(
            f"gather_indirect: states has shape {list(states.shape)}; expected "
            "[rows, heads, capacity, dim]"
        )
    rows, heads, capacity, _ = states.shape
    if indirection.dim() != 2 or len(indirection) != rows or indirection.dtype != torch.int32:
        raise ValueError(
            f"gather_indirect: indirection is {indirection.dtype} {list(indirection.shape)}; "
            f"expected torch.int32 [{rows}, capacity]"
        )
    most = min(capacity, indirection.shape[1])
    if length is None:
        length = most
    length = check_int("gather_indirect", "length", length, 0, most)
    device = states.device
    return states[
        indirection[:, None, :length].long(),
        torch.arange(heads, device=device)[:, None],
        torch.arange(length, device=device),
    ]


def _size(name: str, value: object) -> int:
    if not is_int(value):
        raise ValueError(f"BeamIndirection: {name} is {value}; expected an int >= 0")
    return check_int("BeamIndirection", name, value, 0, limits="an int >= 0")


class BeamIndirection:
    """An index ``[rows, capacity]`` of a cache that beams share, and the rows' lengths.

    A request's prompt is computed once and written to one row, which all of its beams read. Later
    tokens of row r are written to row r of the cache. A beam step changes only this index.

    Parameters
    ----------
    rows : int
        Number of rows of the cache: beams of all requests.
    capacity : int
        Number of positions of a row.
    device : torch.device or str
        Device of the cache.

    Attributes
    ----------
    table : Tensor
        ``[rows, capacity]`` int32: the cache row of each position of a row. Entries from a row's
        length on are the row itself.
    lengths : Tensor
        ``[rows]`` int32: number of positions in use.

    Examples
    --------
    >>> index = BeamIndirection(rows=4, capacity=100)
    >>> index.begin(range(0, 4), prompt_row=0, length=7)  # the prompt's K and V are in row 0
    >>> # each step: write K and V of the new tokens to row r, position index.lengths[r]; attention
    >>> index.advance()
    >>> index.reorder_(torch.tensor([0, 0, 2, 1]))
    """

    def __init__(self, rows: int, capacity: int, *, device: torch.device | str = "cpu") -> None:
        rows, capacity = _size("rows", rows), _size("capacity", capacity)
        # Tensors made under inference_mode could not be written to outside of it.
        with torch.inference_mode(False):
            own = torch.arange(rows, dtype=torch.int32, device=device)
            self.table = own[:, None].repeat(1, capacity)
            self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)

    def begin(self, rows: Sequence[int], prompt_row: int, length: int) -> None:
        """Start a request: ``rows`` read ``length`` positions of a prompt from ``prompt_row``.

        Other rows are unchanged. For a request of one row, with itself as ``prompt_row``, this
        discards the row's former content.
        """
        count, capacity = self.table.shape
        rows = [check_int("begin", "rows", row) for row in rows]
        prompt_row = check_int("begin", "prompt_row", prompt_row)
        if not rows or not all(0 <= row < count for row in (*rows, prompt_row)):
            raise ValueError(
                f"begin: rows are {list(rows)}, prompt_row is {prompt_row}; expected 0 to "
                f"{count - 1}"
            )
        length = check_int("begin", "length", length, 0, capacity)
        chosen = uploaded(rows, torch.int64, self.table.device)
        self.table[chosen, :length] = prompt_row
        self.table[chosen, length:] = chosen[:, None].int()
        self.lengths[chosen] = length

    def advance(self, num_tokens: int = 1) -> None:
        """Add ``num_tokens``, which were written to each row, to the lengths."""
        num_tokens = check_int("advance", "num_tokens", num_tokens)
        capacity = self.table.shape[1]
        # Elsewhere the lengths would have to be waited for.
        if self.lengths.device.type == "cpu" and len(self.lengths):
            longest = int(self.lengths.max()) + num_tokens
            if num_tokens < 0 or longest > capacity:
                raise ValueError(
                    f"advance: num_tokens is {num_tokens}, which makes a row {longest} long; "
                    f"expected at most {capacity}"
                )
        self.lengths += num_tokens

    def reorder_(self, parents: Tensor) -> None:
        """Set row r to row ``parents[r]``, a beam of the same request and so of equal length."""
        update_beam_indirection_(self.table, parents, self.lengths)

    def gather(self, states: Tensor, length: int | None = None) -> Tensor:
        """Return ``gather_indirect(states, self.table, length)``."""
        return gather_indirect(states, self.table, length)
