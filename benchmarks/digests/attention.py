"""Cases of attention: of prompts and of caches, in rows, blocks, rings and beams."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import lmdecode
from benchmarks.digests.kinds import DTYPES, Kinds, Parts
from tests.attention.attention_cases import Paged, normal, random_cases
from tests.attention.test_attention_tables import beams
from tests.decoder.causal_steps import (
    generated_logits,
    new_caches,
    packed,
    prompt_logits,
    state,
    wide,
)
from tests.kv_cache import test_ring_cache as rings
from tests.support.random_tensors import randint, randn

KINDS = Kinds("attention")
_GROUPS = (1, 2, 3, 4, 5, 7, 8, 11)  # query heads of a head of keys and values


@KINDS.add(80)
def sliding_window_attention(choice: random.Random, number: int) -> Parts:
    for case in random_cases(number, 3):
        yield case.call(lmdecode.sliding_window_attention, return_lse=choice.random() < 0.7)


@KINDS.add(100)
def sliding_window_decode(choice: random.Random, number: int) -> Parts:
    for case in random_cases(number, 6, decode=True):
        yield case.call(lmdecode.sliding_window_decode, return_lse=choice.random() < 0.7)


def _attended(choice: random.Random, q: Tensor, *cache: Tensor, **tables: Tensor) -> Parts:
    heads, window = q.shape[1], choice.choice((None, 1, 70, 90, 300))
    options: dict[str, Any] = {"window": window, "return_lse": True, **tables}
    if choice.random() < 0.3:
        options |= {"softcap": 3.0, "scale": choice.choice((0.3, -0.2))}
    if choice.random() < 0.3:
        options["sinks"] = randn(heads)
    if choice.random() < 0.3:
        options["alibi_slopes"] = randn(heads).abs()
    for op in (lmdecode.sliding_window_attention, lmdecode.sliding_window_decode):
        yield op(q, *cache, **options)


@KINDS.add(40)
def cache_in_blocks(choice: random.Random, number: int) -> Parts:
    dtype, kv_heads = choice.choice(DTYPES), choice.choice((1, 2, 3))
    size = choice.choice((16, 20, 32, 33, 64, 80, 128, 256))
    lengths = (0, 1, 5, 63, 64, 130, 513, 1100)
    paged = Paged(
        [choice.choice(lengths) for _ in range(choice.randint(1, 4))],
        block_size=choice.choice((1, 5, 16, 32, 64, 100, 128, 256)), size=size,
        value_size=choice.choice((None, None, 24, 40)), kv_heads=kv_heads, dtype=dtype,
    )  # fmt: skip
    heads, queries = kv_heads * choice.choice(_GROUPS), choice.choice((1, 1, 2, 3, 9, 70))
    q = normal(len(paged.lengths), heads, queries, size, seed=number, dtype=dtype)
    yield from _attended(choice, q, paged.k, paged.v, **paged.options())


@KINDS.add(30)
def cache_of_beams(choice: random.Random, number: int) -> Parts:
    dtype, rows = choice.choice(DTYPES), choice.randint(1, 5)
    keys, size = choice.choice((1, 40, 64, 130)), choice.choice((20, 32, 64, 128))
    table, kv_heads = beams(rows, keys, number), choice.choice((1, 2))
    k = normal(rows, kv_heads, keys, size, seed=1, dtype=dtype)
    v = normal(rows, kv_heads, keys, choice.choice((size, 48)), seed=2, dtype=dtype)
    heads, queries = kv_heads * choice.choice(_GROUPS), choice.choice((1, 1, 2, 40))
    q = normal(rows, heads, queries, size, seed=number, dtype=dtype)
    yield from _attended(choice, q, k, v, indirection=table)


@KINDS.add(20)
def wide_heads(choice: random.Random, number: int) -> Parts:
    dtype, size = choice.choice(DTYPES), choice.choice((129, 192, 200, 256, 320, 384, 512, 700))
    keys, kv_heads = choice.choice((1, 90, 300, 600)), choice.choice((1, 2))
    k, v = (normal(1, kv_heads, keys, size, seed=seed, dtype=dtype) for seed in (1, 2))
    heads, queries = kv_heads * choice.choice(_GROUPS), choice.choice((1, 1, 3, 40))
    q = normal(1, heads, queries, size, seed=number, dtype=dtype)
    yield from _attended(choice, q, k, v)


@KINDS.add(20)
def merge_attention_states(choice: random.Random, number: int) -> Parts:
    shape = tuple(choice.randint(1, 6) for _ in range(3))
    size, dtype = choice.choice((1, 16, 37, 64, 128)), choice.choice(DTYPES)
    states: list[Tensor] = []
    for seed in (number, number + 1):
        sums = normal(*shape, seed=seed) * choice.choice((0.1, 5.0, 50.0))
        for special in (-torch.inf, torch.inf, torch.nan):
            if choice.random() < 0.2:
                sums[torch.rand(shape) < 0.2] = special
        states += (normal(*shape, size, seed=seed, dtype=dtype), sums)
    yield lmdecode.merge_attention_states(*states)


@KINDS.add(15)
def ring_kv_cache(choice: random.Random, number: int) -> Parts:
    window, spare = choice.randint(1, 16), choice.choice((0, 3, 20))
    cache, total = rings.make(window, window + spare, choice.choice((0, 3))), 0
    options = dict(choice.choice(list(rings.OPTIONS.values())))
    is_padded, batch = options.pop("padding", False), rings.BATCH
    for place, count in enumerate(choice.choice(rings.LENGTHS)[:12]):
        total += count
        if is_padded:
            options["key_padding_mask"] = torch.arange(batch * total).view(batch, total) % 3 > 0
        q = randn(batch, 2 * rings.HEADS, count, rings.SIZE, seed=number + place)
        chunk = rings.chunk(count, number + place)
        yield cache.attend(q, *chunk, return_lse=True, **options)
    yield cache.ordered()


@KINDS.add(25)
def caches_of_models(choice: random.Random, number: int) -> Parts:
    """Keys and values in blocks, int8 among them: of prompts and token by token."""
    models = (
        wide(), wide("int8"), packed("llama", "plain"), packed("gpt_oss", "plain"),
        packed("mistral", "window"), packed("gemma3_text", "plain"),
        packed("llama", "group of 7, gelu"),
    )  # fmt: skip
    model, dtype = choice.choice(models), choice.choice(("float32", "bfloat16", "int8", "int8"))
    caches = new_caches(model, dtype=dtype, max_rows=choice.choice((5, 37, 512)))
    text = randint(model.config.vocab_size, choice.randint(1, 120), seed=number)
    yield prompt_logits(caches, text)
    yield generated_logits(caches, text[:6])
    yield generated_logits(caches, text[:3], len(text[:3]))
    yield state(caches)
