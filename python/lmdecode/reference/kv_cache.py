"""The KV cache ops in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = [
    "block_table_append_",
    "block_table_reorder_",
    "copy_blocks_",
    "gather_indirect",
    "reorder_cache_",
    "ring_cache_append_",
    "update_beam_indirection_",
]


def reorder_cache_(
    tensors: Sequence[Tensor],
    parents: Tensor,
    *,
    batch_dim: int = 0,
    length_dim: int | None = None,
    length: int | None = None,
) -> None:
    """``lmdecode.reorder_cache_``: by way of a copy of each tensor."""
    for tensor in tensors:
        part = tensor if length_dim is None else tensor.narrow(length_dim, 0, length or 0)
        part.copy_(part.index_select(batch_dim, parents))


def update_beam_indirection_(indirection: Tensor, parents: Tensor, length: int | Tensor) -> None:
    """``lmdecode.update_beam_indirection_``: position by position of a copy."""
    rows, capacity = indirection.shape
    before = indirection.clone()
    for row in range(rows):
        used = int(length[row]) if isinstance(length, Tensor) else length
        indirection[row, :used] = before[int(parents[row]), :used]
        if used < capacity:
            indirection[row, used] = row


def gather_indirect(states: Tensor, indirection: Tensor, length: int | None = None) -> Tensor:
    """``lmdecode.gather_indirect``: position by position."""
    length = indirection.shape[1] if length is None else length
    out = states.new_empty((*states.shape[:2], length, states.shape[3]))
    for row in range(len(states)):
        for position in range(length):
            out[row, :, position] = states[int(indirection[row, position]), :, position]
    return out


def ring_cache_append_(
    keys: Tensor,
    values: Tensor,
    k: Tensor,
    v: Tensor,
    position: int | Tensor,
    *,
    num_sink_tokens: int = 0,
) -> None:
    """``lmdecode.ring_cache_append_``: token by token, later ones over earlier ones."""
    capacity = keys.shape[2] - num_sink_tokens
    for row in range(len(keys)):
        first = int(position[row]) if isinstance(position, Tensor) else position
        for token in range(k.shape[2]):
            slot = first + token
            if slot >= num_sink_tokens:
                slot = num_sink_tokens + (slot - num_sink_tokens) % capacity
            keys[row, :, slot] = k[row, :, token]
            values[row, :, slot] = v[row, :, token]


def copy_blocks_(pools: Sequence[Tensor], copies: Tensor) -> None:
    """``lmdecode.copy_blocks_``: one copy after the other."""
    for source, target, positions in copies.tolist():
        for pool in pools:
            pool[target, :, :positions] = pool[source, :, :positions]


def block_table_append_(
    block_table: Tensor,
    lengths: Tensor,
    ref_counts: Tensor,
    free_blocks: Tensor,
    counters: Tensor,
    copies: Tensor,
    num_tokens: Tensor,
    block_size: int,
) -> None:
    """The op of ``lmdecode.BlockTable.append``, on lists that are written back if it succeeds."""
    refs, free = ref_counts.tolist(), free_blocks[: int(counters[0])].tolist()
    rows = [[block for block in row if block >= 0] for row in block_table.tolist()]
    asked: list[list[int]] = []
    for row, (length, tokens) in enumerate(zip(lengths.tolist(), num_tokens.tolist(), strict=True)):
        if tokens and length % block_size and refs[rows[row][-1]] > 1:
            refs[rows[row][-1]] -= 1
            asked.append([rows[row][-1], row, length % block_size])
    new_lengths = (lengths + num_tokens).tolist()
    wanted = [
        -(-length // block_size) - len(row) for length, row in zip(new_lengths, rows, strict=True)
    ]
    missing = len(asked) + sum(wanted) - len(free)
    counters[2], counters[1] = max(missing, 0), 0 if missing > 0 else len(asked)
    if missing > 0:
        return
    for copy in asked:
        row, copy[1] = copy[1], free.pop()
        rows[row][-1] = copy[1]
        refs[copy[1]] = 1
    for blocks, count in zip(rows, wanted, strict=True):
        for _ in range(count):
            blocks.append(free.pop())
            refs[blocks[-1]] = 1
    for row, blocks in enumerate(rows):
        block_table[row, : len(blocks)] = block_table.new_tensor(blocks)
    lengths.copy_(lengths.new_tensor(new_lengths))
    ref_counts.copy_(ref_counts.new_tensor(refs))
    copies[: len(asked)] = copies.new_tensor(asked).view(-1, 3)
    counters[0] = len(free)


def block_table_reorder_(
    block_table: Tensor,
    lengths: Tensor,
    ref_counts: Tensor,
    free_blocks: Tensor,
    counters: Tensor,
    parents: Tensor,
    rows: int,
    block_size: int,
) -> None:
    """The op of ``lmdecode.BlockTable.reorder_``: counts every use of a block anew."""
    before, old_lengths = block_table[:rows].clone(), lengths[:rows].clone()
    map_ = parents.long()
    block_table.fill_(-1)
    lengths.zero_()
    block_table[: len(map_)] = before[map_]
    lengths[: len(map_)] = old_lengths[map_]
    refs = ref_counts.new_zeros(ref_counts.shape)
    used = block_table[block_table >= 0].long()
    refs.index_add_(0, used, refs.new_ones(used.shape))
    left = [row for row in range(rows) if row not in map_.tolist()]
    unused = [block for block in before[left].flatten().tolist() if block >= 0 and not refs[block]]
    last_uses = list(dict.fromkeys(reversed(unused)))[::-1]  # a block is free after its last row
    free = [*free_blocks[: int(counters[0])].tolist(), *last_uses]
    free_blocks[: len(free)] = free_blocks.new_tensor(free)
    counters[0] = len(free)
    ref_counts.copy_(refs)
