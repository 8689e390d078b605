"""The sampling backend: SGLang's support, its distribution, seeds, and what it hands on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

sampler_module = pytest.importorskip("sglang.srt.layers.sampler")

from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # noqa: E402
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo  # noqa: E402

from lmdecode.integrations import sglang  # noqa: E402
from lmdecode.integrations.sglang.sampler import BACKEND, LmdecodeSampler, draw  # noqa: E402

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
    if "k" in filters:
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


def info_of(rows: Tensor | None, **changes: Any) -> Any:
    k, p, m = parameters(16, 4)
    return SamplingBatchInfo(**{**dict(
        temperatures=torch.ones(16, 1), top_ks=k, top_ps=p, min_ps=m, is_all_greedy=False,
        is_any_greedy=False, need_top_k_sampling=True, need_top_p_sampling=True,
        need_min_p_sampling=False, vocab_size=VOCAB, sampling_mask_batch_indices=rows, device="cpu",
    ), **changes})  # fmt: skip


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The sampler that SGLang makes for the backend; its engine sets up groups and options."""
    parts = SimpleNamespace
    monkeypatch.setattr(
        sampler_module, "get_parallel", lambda: parts(tp_group=parts(device_group=None))
    )
    options = parts(
        deterministic=parts(rl_on_policy_target=None, enable_deterministic_inference=True),
        kernel=parts(sampling_backend=BACKEND), features=parts(sampling_mask_max_tokens=None),
    )  # fmt: skip
    monkeypatch.setattr(sampler_module, "get_exec", lambda: options)
    monkeypatch.setattr(sampler_module, "get_server_args", lambda: options)
    sglang.register()
    sglang.register()
    made = sampler_module.create_sampler()
    assert isinstance(made, LmdecodeSampler) and isinstance(made, sampler_module.Sampler)
    return made


def test_the_sampler_of_sglang_calls_it(sampler: Any) -> None:
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


def test_a_step_of_sglang_s_sampler_draws_with_it(sampler: Any) -> None:
    seed, position = torch.arange(16), torch.arange(16)
    logits = 3 * torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(6))
    info = info_of(None, temperatures=torch.full((16, 1), 0.7), sampling_seed=seed)
    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    tokens = sampler(output, info, True, [2] * 16, [None] * 16, position)
    probs = (logits / 0.7).softmax(-1)
    drawn, _ = draw(probs, info.top_ks, info.top_ps, None, seed, position)
    assert torch.equal(tokens, drawn)
    rows = torch.arange(16)
    assert torch.allclose(output.next_token_logprobs, probs.log()[rows, tokens.long()])
    greedy = info_of(None, is_all_greedy=True, is_any_greedy=True)
    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    assert torch.equal(sampler(output, greedy, False, [], [], position), logits.argmax(-1))
