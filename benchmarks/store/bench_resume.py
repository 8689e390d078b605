"""Time to the first token of a long prompt: resumed from the store, against computed."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import lru_cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import OURS, Case, Contestant, Result
from lmdecode.store import Fingerprint, KVStore

GROUP = "resume"
SOURCES = ("store/",)
COMPUTED = "computed"
_OPTIONS: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False}


@lru_cache(maxsize=1)
def _model(quick: bool) -> Any:
    """A Llama with random weights: 8 layers of 1024, 4 of 16 heads for keys and values."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    size = 128 if quick else 1024
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=size, intermediate_size=11 * size // 4,
        num_hidden_layers=2 if quick else 8, num_attention_heads=size // 64,
        num_key_value_heads=max(1, size // 256), max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def _contestants(with_peers: bool, *, num_tokens: int, quick: bool) -> list[Contestant]:
    from lmdecode.integrations.transformers import cache_from_kv, generate_with_store

    model = _model(quick)
    folder = Path(tempfile.mkdtemp(prefix="lmdecode-bench-", dir=os.environ.get("LMD_BENCH_DIR")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    prompt = torch.arange(num_tokens)[None] * 7919 % 31000 + 5
    mask = torch.ones_like(prompt)
    # Nothing of the weights counts here but that they are always the same.
    fingerprint = Fingerprint.from_model(model)
    with KVStore(folder, fingerprint=fingerprint, capacity_bytes=4 << 30) as filled:
        expected = generate_with_store(model, filled, "filled", prompt, **_OPTIONS)
    # Only read: a call stores nothing, and finds the model at another session, so that it queries.
    store = KVStore(folder, fingerprint=fingerprint, readonly=True, io_threads=1)
    names = cycle(("one", "two"))

    def resume() -> None:
        ids = generate_with_store(model, store, next(names), prompt, rewind=True, **_OPTIONS)
        if not torch.equal(ids, expected):
            raise RuntimeError("the resumed prompt has another first token")

    contestants = [Contestant(OURS, resume)]
    if not with_peers:
        return contestants

    def compute() -> None:
        model.generate(prompt, attention_mask=mask, **_OPTIONS)

    hit = store.lookup(prompt[0, :-1])
    staging = store.load(hit)
    assert staging is not None
    cache = cache_from_kv(model.config, staging)

    @torch.no_grad()
    def last_token() -> None:
        # All that is left where the cache was never lost.
        model(prompt[:, -1:], past_key_values=cache, use_cache=True)
        cache.crop(-1)

    def lookup_and_load() -> None:
        with_hit = store.lookup(prompt[0, :-1])
        store.load(with_hit, out=staging)
        with_hit.release()

    return [
        *contestants,
        Contestant(COMPUTED, compute),
        Contestant("look up, load", lookup_and_load, complete=False),
        Contestant("one token", last_token, complete=False),
    ]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` a small one."""
    lengths = (128,) if quick else (512, 4096)
    shape = "2 layers of 128" if quick else "8 layers of 1024"
    return [
        Case(
            GROUP, "time to first token", {"work": f"{length} tokens, {shape}, f32"},
            partial(_contestants, num_tokens=length, quick=quick), threads=1,
        )
        for length in lengths
    ]  # fmt: skip


def _times_faster(result: Result) -> float | None:
    return result.ratio(COMPUTED) if "4096 tokens" in result.case.key else None


GOALS = [
    Goal("time to first token", "warm", "4096 tokens, against computing them", "at least", 50,
         _times_faster),
]  # fmt: skip


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goal on the prompt of 4096 tokens."""
    return evaluate(GOALS, results)
