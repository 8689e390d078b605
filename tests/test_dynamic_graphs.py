"""Every op in one graph of torch.compile while sizes and numbers change from call to call."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

import lmdecode
from tests.support.random_tensors import randn as normal

pytestmark = pytest.mark.usefixtures("fresh_compiler")


Q, K, V, X = normal(2, 4, 6, 16), normal(2, 2, 12, 16), normal(2, 2, 12, 24), normal(6, 40)
IDS = torch.randint(3, 40, (6, 12), generator=torch.Generator().manual_seed(1))
SWAPPED, POOL = torch.tensor([1, 0]), normal(5, 2, 4, 3)
LAYER = lmdecode.PackedLinear(normal(8, 40), normal(8))


class Calls(NamedTuple):
    """A function, and calls of it with other sizes and numbers."""

    function: Callable[..., Any]
    calls: list[tuple[Any, ...]]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *numbers: Any) -> Any:
    scale, softcap, window = numbers
    options = {"scale": scale, "softcap": softcap, "window": window, "return_lse": True}
    parts = [lmdecode.sliding_window_attention(q, k, v, window_right=window, **options)]
    parts.append(lmdecode.sliding_window_decode(q, k, v, **options))
    return lmdecode.merge_attention_states(*parts[0], *parts[1])


def best(x: torch.Tensor, count: int, beams: int, *numbers: Any) -> Any:
    penalty, ngram, diversity = numbers
    return lmdecode.log_softmax_top_k(
        x, x[:, 0], count, num_beams=beams, sequences=IDS[: len(x)], repetition_penalty=penalty,
        no_repeat_ngram_size=ngram, diversity_tokens=IDS[: len(x) // beams, :2],
        diversity_penalty=diversity,
    )  # fmt: skip


def append(k: torch.Tensor, v: torch.Tensor, position: int, sinks: int) -> Any:
    keys, values = k.new_zeros(2, 2, 20, 16), v.new_zeros(2, 2, 20, 24)
    lmdecode.ring_cache_append_(keys, values, k, v, position, num_sink_tokens=sinks)
    return keys, values


def move(cache: torch.Tensor, table: torch.Tensor) -> Any:
    cache, table = cache.clone(), table.clone()
    lmdecode.reorder_cache_([cache], SWAPPED)
    lmdecode.update_beam_indirection_(table, SWAPPED, table[:, 0] + 2)
    return cache, table


def copy(pool: torch.Tensor, copies: torch.Tensor) -> Any:
    pool = pool.clone()
    lmdecode.copy_blocks_([pool], copies)
    return pool


CASES = {
    "attention": Calls(
        attend,
        [(Q[:, :, :n], K[:, :, : n + 3], V[:, :, : n + 3], *numbers)
         for n, *numbers in ((5, 0.3, 10.0, 4), (4, 0.5, 20.0, 5), (3, 0.7, 5.0, 6))],
    ),
    "the scale of a head size": Calls(
        lmdecode.sliding_window_attention,
        [(Q[..., :n].contiguous(), K[..., :n].contiguous(), V) for n in (16, 12, 8)],
    ),
    "sampling": Calls(
        lambda x, *numbers: lmdecode.top_k_top_p_sample(
            x, top_k=numbers[0], top_p=numbers[1], temperature=numbers[2], seed=numbers[3]
        ),
        [(X[:n], n, p, p + 0.2, n) for n, p in ((5, 0.9), (4, 0.8), (3, 0.7))],
    ),
    "min_p": Calls(
        lambda x, p: lmdecode.top_k_top_p_sample(x, min_p=p, seed=0, return_logits=True),
        [(X[:n], n / 50) for n in (5, 4, 3)],
    ),
    "prompt_lookup": Calls(lmdecode.prompt_lookup, [(IDS[:n], n, n - 1) for n in (5, 4, 3)]),
    "beams": Calls(
        best,
        [(X[:6], 5, 3, 1.2, 2, 0.1), (X[:4], 4, 2, 1.3, 3, 0.2), (X[:2], 6, 1, 1.4, 4, 0.3)],
    ),
    "rings": Calls(
        append,
        [(K[:, :, :n], V[:, :, :n], position, sinks)
         for n, position, sinks in ((5, 3, 1), (4, 7, 2), (3, 11, 3))],
    ),
    "beams of caches": Calls(
        move,
        [(K[:, :, :n].contiguous(), torch.zeros(2, n, dtype=torch.int32)) for n in (5, 4, 3)],
    ),
    "gather_indirect": Calls(
        lmdecode.gather_indirect,
        [(K, torch.zeros(2, 12, dtype=torch.int32), n) for n in (5, 4, 3)],
    ),
    "blocks": Calls(
        copy, [(POOL[:n], torch.tensor([[0, 1, n - 1]], dtype=torch.int32)) for n in (5, 4, 3)]
    ),
    "linear layers": Calls(
        lambda x, eps: (LAYER(x), lmdecode.layer_norm(x, eps=eps), lmdecode.rms_norm(x, eps=eps)),
        [(X[:n], eps) for n, eps in ((5, 1e-5), (4, 1e-6), (3, 1e-3))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True], ids=["numbers", "all"])
@pytest.mark.parametrize("name", CASES)
def test_sizes_and_numbers_change(name: str, dynamic: bool | None) -> None:
    function, calls = CASES[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for arguments in calls:
        got, want = tree_leaves(compiled(*arguments)), tree_leaves(function(*arguments))
        torch.testing.assert_close(got, want, rtol=0, atol=0)
