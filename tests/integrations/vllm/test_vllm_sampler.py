"""The sampler's plug-in against a stand-in of vLLM's sampler, without vLLM."""

import math
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import lmdecode
from lmdecode.integrations.vllm import register
from lmdecode.integrations.vllm.sampler import RowNoise

MODULE = "vllm.v1.sample.ops.topk_topp_sampler"
VOCAB = 50
WEAK_GENERATORS = bool(torch.Generator.__weakrefoffset__)


class StandIn:
    """What the plug-in knows of vLLM's TopKTopPSampler."""

    def __init__(self, logprobs_mode: str = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        self.logprobs_mode = logprobs_mode
        self.use_fp64_gumbel = use_fp64_gumbel
        self.forward = self.forward_cpu

    def forward_cpu(
        self,
        logits: Tensor,
        generators: dict[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError("stock")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in: Any = ModuleType(MODULE)
    stand_in.PROCESSED_LOGPROBS_MODES = ("processed_logits", "processed_logprobs")
    stand_in.TopKTopPSampler = type("TopKTopPSampler", (), dict(vars(StandIn)))
    monkeypatch.setitem(sys.modules, MODULE, stand_in)
    monkeypatch.delenv("LMDECODE_VLLM_SAMPLER", raising=False)
    return stand_in


@pytest.fixture
def make(module: Any) -> Callable[..., Any]:
    if not WEAK_GENERATORS:
        pytest.skip("generators of torch 2.11 cannot be referenced weakly")
    register()
    return lambda *arguments: module.TopKTopPSampler(*arguments)


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def texts(sampler: Any, logits: Tensor, generators: dict[int, Any], steps: int) -> list[list[int]]:
    drawn = [sampler.forward(logits.clone(), generators, None, None)[0] for _ in range(steps)]
    return torch.stack(drawn, dim=1).tolist()


def test_it_takes_the_place_of_vllms_method_once(module: Any, make: Any) -> None:
    stock = StandIn.forward_cpu
    ours = module.TopKTopPSampler.forward_cpu
    assert ours is not stock
    register()
    assert module.TopKTopPSampler.forward_cpu is ours


def test_it_is_switched_off(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = module.TopKTopPSampler.forward_cpu
    monkeypatch.setenv("LMDECODE_VLLM_SAMPLER", "0")
    register()
    assert module.TopKTopPSampler.forward_cpu is stock


def _other_arguments(module: Any) -> None:
    module.TopKTopPSampler.forward_cpu = lambda self, logits, k, p, generators: None


def _no_class(module: Any) -> None:
    del module.TopKTopPSampler


def _no_modes(module: Any) -> None:
    del module.PROCESSED_LOGPROBS_MODES


def _other_attributes(module: Any) -> None:
    module.TopKTopPSampler.__init__ = lambda self, mode: None


@pytest.mark.parametrize("change", [_other_arguments, _no_class, _no_modes, _other_attributes])
def test_a_vllm_that_it_does_not_know_stays_as_it_is(module: Any, change: Any) -> None:
    change(module)
    before = dict(vars(getattr(module, "TopKTopPSampler", object)))
    with pytest.warns(RuntimeWarning, match="does not know the sampler") as seen:
        register()
    assert len(seen) == 1
    assert dict(vars(getattr(module, "TopKTopPSampler", object))) == before


@pytest.mark.skipif(WEAK_GENERATORS, reason="later releases of torch have what it needs")
def test_torch_2_11_leaves_vllm_as_it_is(module: Any) -> None:
    stock = module.TopKTopPSampler.forward_cpu
    with pytest.warns(RuntimeWarning, match="generators that can be referenced weakly"):
        register()
    assert module.TopKTopPSampler.forward_cpu is stock


def test_a_row_with_a_seed_draws_the_same_alone_and_in_a_batch(make: Any) -> None:
    sampler, logits = make(), rows(5)
    together = texts(sampler, logits, {1: generator(7), 3: generator(8)}, 20)
    for row, seed in ((1, 7), (3, 8)):
        assert texts(sampler, logits[row : row + 1], {0: generator(seed)}, 20)[0] == together[row]
    assert len(set(together[1])) > 3
    assert texts(sampler, logits[1:2], {0: generator(8)}, 20)[0] != together[1]


def test_rows_without_a_seed_follow_torchs_generator(make: Any) -> None:
    sampler, logits = make(), rows(1).expand(6, VOCAB)
    torch.manual_seed(3)
    first = texts(sampler, logits, {}, 10)
    torch.manual_seed(3)
    assert texts(sampler, logits, {}, 10) == first
    assert len({tuple(text) for text in first}) == 6
    assert texts(sampler, logits, {}, 10) != first


def test_a_draw_that_vllm_throws_away_does_not_count(make: Any) -> None:
    """It takes the generator back by 4, as it does where a prompt is read in chunks."""
    sampler, logits = make(), rows(1)
    expected = texts(sampler, logits, {0: generator(5)}, 6)[0]
    generators: dict[int, Any] = {0: generator(5)}
    drawn = texts(sampler, logits, generators, 2)[0]
    for _ in range(3):
        sampler.forward(logits.clone(), generators, None, None)
        generators[0].set_offset(generators[0].get_offset() - 4)
    assert drawn + texts(sampler, logits, generators, 4)[0] == expected


def test_a_request_goes_on_after_a_preemption(make: Any) -> None:
    """vLLM then puts the generator back that it made for the request."""
    sampler, logits, own = make(), rows(1), generator(5)
    expected = texts(sampler, logits, {0: generator(5)}, 6)[0]
    assert texts(sampler, logits, {0: own}, 2)[0] + texts(sampler, logits, {0: own}, 4)[0] == (
        expected
    )


def test_other_draws_from_a_generator_are_those_of_vllms(make: Any) -> None:
    """As of drafts, which vLLM accepts by draws of its own."""
    generators: dict[int, Any] = {0: generator(5)}
    make().forward(rows(1), generators, None, None)
    assert isinstance(generators[0], RowNoise)
    assert torch.equal(
        torch.rand(4, generator=generators[0]), torch.rand(4, generator=generator(5))
    )


def test_seeds_of_64_bits(make: Any) -> None:
    for seed in (0, -1, 2**63 - 1, 2**64 - 1, -(2**63)):
        generators = {0: generator(seed)}
        tokens, _ = make().forward(rows(1), generators, None, None)
        assert 0 <= tokens.item() < VOCAB
        assert 0 <= generators[0].seed_of_row < 2**63


def test_filters_are_those_of_the_dialect_vllm(make: Any) -> None:
    logits = rows(40).round()  # ties
    k = torch.tensor([1, 3, 8, VOCAB] * 10, dtype=torch.int32)
    p = torch.tensor([0.3, 0.9, 1.0, 0.6, 0.99] * 8)
    for top_k, top_p in ((None, None), (k, None), (None, p), (k, p)):
        expected = lmdecode.top_k_top_p_sample(
            logits, top_k, top_p, greedy=True, return_logits=True, dialect="vllm"
        ).kept_logits
        tokens, kept = make("processed_logits").forward(logits.clone(), {}, top_k, top_p)
        assert torch.equal(kept, expected)
        assert (kept.gather(1, tokens[:, None]) > -math.inf).all()
        _, logprobs = make("processed_logprobs").forward(logits.clone(), {}, top_k, top_p)
        assert torch.equal(logprobs, expected.log_softmax(-1))
        for mode in ("raw_logits", "raw_logprobs"):
            assert make(mode).forward(logits.clone(), {}, top_k, top_p)[1] is None


def test_the_noise_of_another_precision_stays_vllms(make: Any) -> None:
    with pytest.raises(NotImplementedError, match="stock"):
        make("raw_logprobs", True).forward(rows(1), {}, None, None)


def test_without_vllm_the_plugin_is_imported_and_says_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "import lmdecode; assert 'lmdecode.integrations' not in sys.modules\n"
        "from lmdecode.integrations.vllm import register\n"
        "try: register()\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "vllm" in done.stdout


def test_the_entry_point_is_this_one() -> None:
    (point,) = {p for p in entry_points(group="vllm.general_plugins") if p.name == "lmdecode"}
    assert point.load() is register
