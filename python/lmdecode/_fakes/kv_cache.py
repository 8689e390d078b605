"""Fakes of the ops of kv_cache."""

from __future__ import annotations

from lmdecode._fakes.registry import check_devices, fake


@fake("reorder_cache_")
def _reorder_cache_(tensors, parents, batch_dim, length_dim, length):
    others = {f"tensors[{number}]": tensor for number, tensor in enumerate(tensors)}
    check_devices("reorder_cache_", "parents", parents, others)


@fake("update_beam_indirection_")
def _update_beam_indirection_(indirection, parents, length, length_rows):
    others = dict(parents=parents, length=length_rows)
    check_devices("update_beam_indirection_", "indirection", indirection, others)


@fake("ring_cache_append_")
def _ring_cache_append_(keys, values, k, v, position, position_rows, num_sink_tokens):
    others = dict(values=values, k=k, v=v, position=position_rows)
    check_devices("ring_cache_append_", "keys", keys, others)


@fake("copy_blocks_")
def _copy_blocks_(pools, copies):
    others = {f"pools[{number}]": pool for number, pool in enumerate(pools)}
    check_devices("copy_blocks_", "copies", copies, others)


@fake("block_table_append_")
def _block_table_append_(
    block_table, lengths, ref_counts, free_blocks, counters, copies, num_tokens, block_size
):
    others = dict(
        lengths=lengths, ref_counts=ref_counts, free_blocks=free_blocks, counters=counters,
        copies=copies, num_tokens=num_tokens,
    )  # fmt: skip
    check_devices("block_table_append_", "block_table", block_table, others)


@fake("block_table_reorder_")
def _block_table_reorder_(
    block_table, lengths, ref_counts, free_blocks, counters, parents, rows, block_size
):
    others = dict(
        lengths=lengths, ref_counts=ref_counts, free_blocks=free_blocks, counters=counters,
        parents=parents,
    )  # fmt: skip
    check_devices("block_table_reorder_", "block_table", block_table, others)
