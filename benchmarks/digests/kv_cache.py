"""Cases of KV caches: all memory behind them, so also what must not be touched."""

from __future__ import annotations

import random
from typing import Any

import torch

import lmdecode
from benchmarks.digests.kinds import Kinds, Parts
from tests.kv_cache import test_block_table as blocks
from tests.kv_cache import test_reorder_cache as reorder
from tests.kv_cache import test_ring_cache as rings
from tests.kv_cache.cache_memory import filled, raw
from tests.kv_cache.test_block_table import Model, state
from tests.kv_cache.test_update_beam_indirection import random_parents, random_table

KINDS = Kinds("kv_cache")


@KINDS.add(50)
def reorder_cache(choice: random.Random, number: int) -> Parts:
    make, batch_dim, length_dim = choice.choice(list(reorder.LAYOUTS.values()))
    caches, options = [make(), make().clone()], {"batch_dim": batch_dim}
    if length_dim is not None and choice.random() < 0.5:
        length = choice.randint(0, caches[0].size(length_dim))
        options |= {"length_dim": length_dim, "length": length}
    lmdecode.reorder_cache_(caches, reorder.random_map(reorder.ROWS, number), **options)
    yield [raw(cache) for cache in caches]


@KINDS.add(30)
def reorder_cache_of_any_dtype(choice: random.Random, number: int) -> Parts:
    rows, dtype = choice.choice((1, 2, 7, 8, 9, 16, 33, 100)), choice.choice(reorder.DTYPES)
    sizes = [(rows, 2, choice.randint(1, 70), choice.choice((1, 3, 8, 64))), (rows, 7)]
    caches = [filled(size, dtype, number) for size in sizes]
    lmdecode.reorder_cache_(caches, reorder.random_map(rows, number))
    yield [raw(cache) for cache in caches]


@KINDS.add(50)
def ring_cache_append(choice: random.Random, number: int) -> Parts:
    ring, states = (choice.choice(list(x.values())) for x in (rings.RINGS, rings.STATES))
    dtype, size = choice.choice(rings.DTYPES), choice.choice((1, 5, 16))
    tokens = choice.choice((0, 1, 2, 7, 8, 30))
    caches = [ring(dtype, size), ring(dtype, 2 * size)]
    chunk = [states(tokens, dtype, size), states(tokens, dtype, 2 * size)]
    position: Any = choice.choice((choice.randrange(40), 2**31 - 1, 2**40))
    if choice.random() < 0.5:
        position = torch.tensor([choice.randrange(40), choice.randrange(40)])
    sinks = choice.choice((0, 1, 6))
    lmdecode.ring_cache_append_(*caches, *chunk, position, num_sink_tokens=sinks)
    yield [raw(cache) for cache in caches]


@KINDS.add(40)
def copy_blocks(choice: random.Random, number: int) -> Parts:
    make = choice.choice(list(blocks.LAYOUTS.values()))
    pools = [make(choice.choice(blocks.DTYPES)) for _ in range(choice.randint(1, 3))]
    lmdecode.copy_blocks_(pools, blocks.random_copies(choice, 8))
    yield [raw(pool) for pool in pools]


@KINDS.add(40)
def update_beam_indirection(choice: random.Random, number: int) -> Parts:
    rows = choice.choice((1, 2, 3, 4, 5, 8, 33))
    capacity = choice.choice((0, 1, 2, 33, 1023, 1024, 1025, 5000))
    table = random_table(rows, capacity, number)
    lengths = torch.tensor([choice.randint(0, capacity) for _ in range(rows)])
    length = lengths if choice.random() < 0.5 else int(lengths[0])
    lmdecode.update_beam_indirection_(table, random_parents(rows, number), length)
    yield table


@KINDS.add(30)
def block_table(choice: random.Random, number: int) -> Parts:
    model = Model(number)
    for _ in range(12):
        model.step()
    yield state(model.table), model.pools
