"""The sampling backend: SGLang's support, its distribution, seeds, and what it hands on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_stand_in import IS_REAL, sampler_module
from torch import Tensor

from lmdecode.integrations import sglang
from lmdecode.integrations.sglang.sampler import BACKEND, LmdecodeSampler, draw

VOCAB = 200


def random_probs(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, VOCAB, generator=generator)).softmax(-1)


def support_of(probs: Tensor, k: int | None, p: float | None, m: float | None) -> Tensor:
    """What SGLang's fallback in torch leaves, of a row of float64."""
    values, ids = probs.double().sort(descending=True)
    before = values.cumsum(0) - values
    kept = torch.ones_like(values, dtype=torch.bool)
    if k is not None:
        kept[k:] = False
    if p is not None and p < 1.0:  # at 1 it is off; SGLang's sums of float32 may pass 1 there
        kept &= before <= p
    if m is not None:
        kept &= values >= m * values[0]
    return torch.zeros(VOCAB, dtype=torch.bool).scatter(0, ids, kept)


def parameters(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k = torch.randint(1, 60, (rows,), generator=generator, dtype=torch.int32)
    k[::5] = 1 << 30  # all
    p = 0.3 + 0.7 * torch.rand(rows, generator=generator)
    p[::7] = 1.0
    return k, p, 0.1 * torch.rand(rows, generator=generator)


@pytest.mark.parametrize("filters", ["k", "p", "m", "kp", "kpm", "pm", ""])
def test_the_support_is_that_of_sglang(filters: str) -> None:
    rows = 300
    probs, (k, p, m) = random_probs(rows), parameters(rows, 1)
    given = (k if "k" in filters else None, p if "p" in filters else None,
             m if "m" in filters else None)  # fmt: skip
    before = probs.clone()
    tokens, support = draw(probs, *given, None, None, return_support=True)
    assert support is not None and torch.equal(probs, before)
    assert tokens.dtype == torch.int32
    different = 0
    for row in range(rows):
        expected = support_of(probs[row], *(None if g is None else g[row].item() for g in given))
        different += not torch.equal(support[row] > 0, expected)
        assert support[row, tokens[row]] > 0
        assert torch.equal(support[row][support[row] > 0], probs[row][support[row] > 0])
    assert different <= 2  # sums of float32 at a bound
    if IS_REAL and "k" in filters:
        theirs_p = torch.where(p < 1.0, p, 2.0) if "p" in filters else torch.full((rows,), 2.0)
        filtered, ids = sampler_module.top_k_top_p_min_p_sampling_from_probs_torch(
            probs.clone(), k, theirs_p, m, "m" in filters, None,
            torch.zeros(rows), return_filtered_probs=True,
        )[1:3]  # fmt: skip
        theirs = torch.zeros_like(probs).scatter(1, ids.long(), filtered)
        assert ((theirs > 0) != (support > 0)).any(1).sum() <= 2


def test_the_distribution() -> None:
    probs = random_probs(1, 3)
    many = probs.expand(20_000, VOCAB)
    k, p = torch.full((20_000,), 12), torch.full((20_000,), 0.9)
    tokens, support = draw(many, k, p, None, None, None, return_support=True)
    assert support is not None
    expected = support[0] / support[0].sum() * 20_000
    found = torch.bincount(tokens.long(), minlength=VOCAB).float()
    kept = expected > 0
    assert found[~kept].sum() == 0
    chi = ((found - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi < 2 * kept.sum() + 30


def test_a_seed_draws_the_same_in_any_batch() -> None:
    probs, (k, p, m) = random_probs(64), parameters(64, 2)
    seed, position = torch.arange(64) * 7 + 1, torch.arange(64) % 5
    tokens, _ = draw(probs, k, p, m, seed, position)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    again, _ = draw(probs[order], k[order], p[order], m[order], seed[order], position[order])
    assert torch.equal(again, tokens[order])
    alone = [
        draw(probs[i : i + 1], k[i : i + 1], p[i : i + 1], m[i : i + 1], seed[i : i + 1],
             position[i : i + 1])[0].item()
        for i in range(8)
    ]  # fmt: skip
    assert alone == tokens[:8].tolist()
    other, _ = draw(probs, None, None, None, seed, position + 1)
    assert not torch.equal(other, draw(probs, None, None, None, seed, position)[0])


def test_torch_s_generator_repeats_draws_without_seeds() -> None:
    probs = random_probs(16)
    torch.manual_seed(5)
    first = draw(probs, None, None, None, None, None)[0]
    torch.manual_seed(5)
    assert torch.equal(first, draw(probs, None, None, None, None, None)[0])


def info_of(rows: Tensor | None, **changes: Any) -> SimpleNamespace:
    k, p, m = parameters(16, 4)
    return SimpleNamespace(**{**dict(
        top_ks=k, top_ps=p, min_ps=m, need_top_k_sampling=True, need_top_p_sampling=True,
        need_min_p_sampling=False, sampling_seed=None, sampling_mask_batch_indices=rows,
    ), **changes})  # fmt: skip


def test_the_sampler_of_sglang_calls_it() -> None:
    sglang.register()
    sglang.register()
    assert sampler_module._CUSTOM_SAMPLER_FACTORIES[BACKEND] is LmdecodeSampler
    assert issubclass(LmdecodeSampler, sampler_module.Sampler)
    sampler = LmdecodeSampler.__new__(LmdecodeSampler)
    probs = random_probs(16)
    seed, position = torch.arange(16), torch.zeros(16, dtype=torch.int64)
    tokens, capture = sampler._sample_from_probs(
        probs, info_of(None, sampling_seed=seed), position, False
    )
    assert capture is None and tokens.shape == (16,)
    rows = torch.tensor([3, 5])
    again, capture = sampler._sample_from_probs(
        probs, info_of(rows, sampling_seed=seed), position, False
    )
    assert torch.equal(tokens, again)
    assert capture.weights.shape == (2, VOCAB) and capture.token_ids is None
    assert torch.equal(capture.selected_weight, probs[rows, tokens[rows].long()])
    assert torch.equal(capture.batch_rows, rows)
    simple = info_of(None, need_top_k_sampling=False, need_top_p_sampling=False)
    assert sampler._sample_from_probs(probs, simple, position, True)[0].shape == (16,)
