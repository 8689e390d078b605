"""Times of the ops beside torch's calls, and of Decoding beside transformers."""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import lmdecode
from benchmarks.attention.bench_merge_attention_states import merge_in_torch
from benchmarks.gpu.machine import Machine, name_of
from benchmarks.harness import OURS, Case, Contestant, Effort
from benchmarks.kv_cache.bench_reorder_cache import parent_map

_FILTERS = {
    "k 50, p 0.9": {"top_k": 50, "top_p": 0.9},
    "k 50, p 0.9, with kept": {"top_k": 50, "top_p": 0.9, "return_logits": True},
    "p 0.9": {"top_p": 0.9},
    "no filter": {},
}


def _topk_chain(x: torch.Tensor) -> torch.Tensor:
    """Top-k 50, top-p 0.9, softmax and multinomial in plain torch, topk first."""
    values, tokens = x.float().topk(50, -1)
    probabilities = values.softmax(-1)
    dropped = probabilities.cumsum(-1) - probabilities >= 0.9
    drawn = torch.multinomial(probabilities.masked_fill(dropped, 0), 1)
    return tokens.gather(-1, drawn)


def _filtered(
    machine: Machine, name: str, batch: int, vocab: int, dtype: torch.dtype
) -> list[Contestant]:
    x = machine.randn(batch, vocab, dtype=dtype) * 3
    seeds, out = torch.arange(batch, device=machine.device), torch.empty_like(x)
    beside = {"torch_topk_chain": partial(_topk_chain, x)} if name == "k 50, p 0.9" else {}
    return machine.contestants(
        ours=partial(lmdecode.top_k_top_p_sample, x, seed=seeds, **_FILTERS[name]),
        limit=partial(out.copy_, x),
        sort_alone=partial(torch.sort, x, -1),
        **beside,
    )


def sampling(machine: Machine) -> Iterator[Case]:
    """Yield each size and filter."""
    shapes = machine.size(
        ((1, 32000), (1, 128256), (64, 128256), (512, 131072), (1, 1 << 20), (64, 262144)),
        ((2, 1000),),
    )
    for dtype in (torch.float32, torch.bfloat16):
        for shape in shapes:
            for name in _FILTERS:
                make = partial(_filtered, machine, name, *shape, dtype)
                logits = f"{shape[0]} x {shape[1]} {name_of(dtype)}"
                yield machine.case("top_k_top_p_sample", name, make, logits=logits)


def _prefill(
    machine: Machine, dtype: torch.dtype, tokens: int, window: int | None
) -> list[Contestant]:
    q, k, v = (machine.randn(1, heads, tokens, 128, dtype=dtype) for heads in (32, 8, 8))
    return machine.contestants(
        ours=lambda: lmdecode.sliding_window_attention(q, k, v, window=window),
        torch_causal=lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    )


def _decode(machine: Machine, dtype: torch.dtype, batch: int, keys: int) -> list[Contestant]:
    q = machine.randn(batch, 32, 1, 128, dtype=dtype)
    k, v = (machine.randn(batch, 8, keys, 128, dtype=dtype) for _ in range(2))
    out = torch.empty_like(k)
    return machine.contestants(
        ours=lambda: lmdecode.sliding_window_decode(q, k, v),
        torch=lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        limit=lambda: out.copy_(k),  # as many bytes as a read of both
    )


def _merge(machine: Machine, dtype: torch.dtype, tokens: int) -> list[Contestant]:
    outputs, lse = (
        machine.randn(2, 1, 32, tokens, 128, dtype=dtype),
        machine.randn(2, 1, 32, tokens),
    )
    states, out = (outputs[0], lse[0], outputs[1], lse[1]), torch.empty_like(outputs[0])
    return machine.contestants(
        ours=lambda: lmdecode.merge_attention_states(*states),
        torch=lambda: merge_in_torch(*states),
        a_copy_of_one_state=lambda: out.copy_(outputs[0]),
    )


def attention(machine: Machine) -> Iterator[Case]:
    """Yield prefill, decode and merge, 32 query heads and 8 of keys, of size 128."""
    prompts = machine.size(
        ((4096, None), (4096, 1024), (16384, 1024), (16384, None)), ((64, None), (64, 16))
    )
    caches = machine.size(((1, 4096), (32, 4096), (64, 16384), (1, 131072)), ((2, 64),))
    dtypes = (torch.bfloat16, torch.float32)
    for dtype, (tokens, window) in itertools.product(dtypes, prompts):
        if dtype == torch.bfloat16 or tokens <= 4096:
            make, name = partial(_prefill, machine, dtype, tokens, window), name_of(dtype)
            yield machine.case("Prefill", name, make, tokens=tokens, window=window)
    for dtype, (batch, keys) in itertools.product(dtypes, caches):
        make = partial(_decode, machine, dtype, batch, keys)
        yield machine.case("One token", name_of(dtype), make, keys=f"{batch} x {keys}")
    for dtype, tokens in itertools.product(dtypes, machine.size((1, 64, 2048, 16384), (3,))):
        make, name = partial(_merge, machine, dtype, tokens), f"{name_of(dtype)}, merge of states"
        yield machine.case("Merge", name, make, rows=f"32 x {tokens}")


_BEAMS = 4
_CAPACITY, _PROMPT = 256, 32


def _best_in_torch(x: torch.Tensor, scores: torch.Tensor) -> object:
    total = x.float().log_softmax(-1) + scores[:, None]
    return total.view(-1, _BEAMS * x.shape[1]).topk(2 * _BEAMS)


def _choose(
    machine: Machine, rows: int, vocab: int, dtype: torch.dtype, has_rules: bool
) -> list[Contestant]:
    x, scores = machine.randn(rows, vocab, dtype=dtype) * 3, machine.randn(rows)
    sequences = torch.randint(3, vocab, (rows, _CAPACITY), device=machine.device)
    rules = dict(sequences=sequences, repetition_penalty=1.2, no_repeat_ngram_size=3)

    def best() -> object:
        options = rules if has_rules else {}
        return lmdecode.log_softmax_top_k(x, scores, 2 * _BEAMS, num_beams=_BEAMS, **options)

    beside = {} if has_rules else {"torch": partial(_best_in_torch, x, scores)}
    return machine.contestants(ours=best, **beside)


def _decide(machine: Machine, requests: int, ends: bool) -> list[Contestant]:
    device = machine.device
    state = lmdecode.new_beam_state(
        requests, _BEAMS, _CAPACITY, keep_beam_indices=True, device=device
    )
    parameters = lmdecode.beam_parameters(
        requests, _BEAMS, prompt_lengths=_PROMPT, max_lengths=_CAPACITY, end_tokens=[2],
        device=device,
    )  # fmt: skip
    state.lengths.fill_(_PROMPT + 100)
    x, scores = machine.randn(requests * _BEAMS, 1000), machine.randn(requests * _BEAMS)
    x[:, 2] = -20.0  # no sequence ends
    best = lmdecode.log_softmax_top_k(x, scores, 2 * _BEAMS, num_beams=_BEAMS)

    def step() -> object:
        state.lengths.fill_(_PROMPT + 100)
        return lmdecode.beam_step(
            state, parameters, best.scores, best.tokens, best.beams, status=best.status
        )

    def finalize() -> object:
        return lmdecode.beam_finalize(state, parameters, num_return_sequences=_BEAMS)

    return machine.contestants(ours=finalize if ends else step)


def beam(machine: Machine) -> Iterator[Case]:
    """Yield the choice of candidates, a step and the end."""
    shapes = machine.size(((4, 32000), (32, 32000), (128, 128256), (512, 131072)), ((8, 500),))
    for dtype in (torch.float32, torch.bfloat16):
        for rows, vocab in shapes:
            for has_rules in (False, True):
                name = "with penalty and n-grams" if has_rules else "no rule"
                make = partial(_choose, machine, rows, vocab, dtype, has_rules)
                logits = f"{rows} x {vocab} {name_of(dtype)}"
                yield machine.case("log_softmax_top_k", name, make, logits=logits)
    for requests in machine.size((1, 8, 64), (2,)):
        for name, ends in (("beam_step and a fill_", False), ("beam_finalize", True)):
            make = partial(_decide, machine, requests, ends)
            yield machine.case("States", name, make, beams=f"{requests} x {_BEAMS}")


_ROWS = 32


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _reorder(machine: Machine, length: int, moved: int) -> list[Contestant]:
    """Keys and values of a layer: at 4096 positions they are larger than the caches."""
    layer = [machine.randn(_ROWS, 8, length, 128, dtype=torch.bfloat16) for _ in range(2)]
    parents = parent_map(_ROWS, moved).to(machine.device)
    sources = [cache[:moved] for cache in layer]
    targets = [torch.empty_like(source) for source in sources]
    return machine.contestants(
        ours=lambda: lmdecode.reorder_cache_(layer, parents),
        torch_index_select=lambda: [x.index_select(0, parents) for x in layer],
        **({"limit": lambda: _copy(targets, sources)} if moved else {}),
    )


def _redirect(machine: Machine, rows: int, capacity: int) -> list[Contestant]:
    table = lmdecode.BeamIndirection(rows, capacity, device=machine.device).table
    lengths = torch.full((rows,), capacity - 10, dtype=torch.int32, device=machine.device)
    parents = parent_map(rows, rows).to(machine.device)
    other = torch.empty_like(table)
    return machine.contestants(
        ours=lambda: lmdecode.update_beam_indirection_(table, parents, lengths),
        torch_index_select=lambda: table.index_select(0, parents),
        limit=lambda: other.copy_(table),
    )


def caches(machine: Machine) -> Iterator[Case]:
    """Yield each op and size; the limit is a copy of what moves."""
    for length in machine.size((256, 4096), (16,)):
        for moved in (0, 8, _ROWS):
            make = partial(_reorder, machine, length, moved)
            sizes = {"caches": f"2 x {_ROWS} x 8 x {length} x 128", "rows that move": moved}
            yield machine.case("reorder_cache_", "bfloat16", make, **sizes)
    for rows, capacity in machine.size(((32, 1024), (32, 8192), (256, 8192)), ((32, 64),)):
        make = partial(_redirect, machine, rows, capacity)
        group = "update_beam_indirection_"
        yield machine.case(group, "all rows move", make, table=f"{rows} x {capacity}")


_SOURCE = 20  # tokens


def _generate(machine: Machine, model: Any, ids: torch.Tensor, tokens: int) -> list[list[int]]:
    result = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), num_beams=_BEAMS,
        min_new_tokens=tokens, max_new_tokens=tokens,
    )  # fmt: skip
    machine.wait()
    return result.tolist()


def _translate(machine: Machine, model: Any, dtype: str, batch: int) -> list[Contestant]:
    """Ours with and without a graph, which must choose the same tokens, and transformers."""
    plain = lmdecode.Decoding.from_pretrained(model, dtype)
    models: dict[str, Any] = {OURS: plain}
    vocab, generator = model.config.vocab_size, torch.Generator().manual_seed(1)
    ids = torch.randint(1, vocab - 1, (batch, _SOURCE), generator=generator).to(machine.device)
    if not machine.is_rehearsal:
        graph = lmdecode.Decoding.from_pretrained(model, dtype, use_cuda_graph=True)
        differs = _generate(machine, plain, ids, 8) != _generate(machine, graph, ids, 8)
        machine.found_fault |= differs
        models["in a CUDA graph" + " DIFFERS" * differs] = graph
    models["transformers"] = copy.deepcopy(model).to(getattr(torch, dtype))
    short, long = machine.size((8, 40), (2, 4))
    calls = {name: partial(_generate, machine, each, ids) for name, each in models.items()}
    return [
        Contestant(name, partial(call, long), "graph" not in name,
                   shorter=(partial(call, short), long - short))
        for name, call in calls.items()
    ]  # fmt: skip


def decoding(machine: Machine) -> Iterator[Case]:
    """Yield translation by a transformer-base model with random weights: the time of a step."""
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("Not run: transformers is not installed.")
    from benchmarks.decoder.bench_decoding import make_model

    layers, size, vocab = machine.size((6, 512, 32000), (1, 64, 500))
    model = make_model(layers, size, vocab).to(machine.device)
    group = f"A step of {layers} layers of {size}, V {vocab}, {_BEAMS} beams, {_SOURCE} of source"
    for dtype in machine.size(("float32", "float16", "bfloat16"), ("float32",)):
        for batch in machine.size((1, 8, 32), (2,)):
            make = partial(_translate, machine, model, dtype, batch)
            yield Case(
                group, "translate", {"dtype": dtype, "batch": batch}, lambda _, make=make: make(),
                clock="wall", effort=Effort(seconds=0.0, rounds=2, min_calls=2),
            )  # fmt: skip
