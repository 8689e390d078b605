"""Which processors are fused, and that fusing them changes no distribution."""

import math
import random

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    LogitNormalization,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from lmdecode.integrations.transformers import TopKTopPLogitsProcessor
from lmdecode.integrations.transformers.sampling.fusion import fuse_sampling


class MyTopK(TopKLogitsWarper):
    """A subclass may do anything."""


class MyList(LogitsProcessorList):
    """A list that may do anything."""


T, K, P, M = (
    TemperatureLogitsWarper(0.5), TopKLogitsWarper(7), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1),
)  # fmt: skip
PENALTY = RepetitionPenaltyLogitsProcessor(1.3)
ALL = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1}


def only(*names: str) -> dict[str, float]:
    return {name: ALL[name] for name in names}


@pytest.mark.parametrize(
    ("processors", "called", "stages"),
    [
        ([], 0, {}),
        ([T, K, P, M], 0, ALL),
        ([K], 0, only("top_k")),
        ([T, M], 0, only("temperature", "min_p")),
        ([PENALTY], 1, {}),
        ([PENALTY, T, K, P, M], 1, ALL),
        # Something else stands between the warpers, or after them.
        ([T, TopHLogitsWarper(0.5), K, P], 2, only("top_k", "top_p")),
        ([T, K, PENALTY], 3, {}),
        ([T, K, P, TypicalLogitsWarper(0.9)], 4, {}),
        ([T, K, LogitNormalization()], 3, {}),
        # Another order than the op's, or one of them twice.
        ([K, T], 1, only("temperature")),
        ([P, K, M], 1, only("top_k", "min_p")),
        ([M, P, K, T], 3, only("temperature")),
        ([T, T], 1, only("temperature")),
        ([K, P, K, P], 2, only("top_k", "top_p")),
        # Warpers that the op cannot express.
        ([T, TopKLogitsWarper(7, filter_value=-1e4)], 2, {}),
        ([T, TopPLogitsWarper(0.9, min_tokens_to_keep=2), M], 2, only("min_p")),
        ([T, MinPLogitsWarper(0.1, min_tokens_to_keep=2)], 2, {}),
        ([T, MyTopK(7), P], 2, only("top_p")),
        ([TemperatureLogitsWarper(1e-60), K], 1, only("top_k")),
        # The minimum of top-k is part of its k.
        ([TopKLogitsWarper(1, min_tokens_to_keep=7), P], 0, only("top_k", "top_p")),
        # Our own processor counts as its stages.
        ([TopKTopPLogitsProcessor(**ALL)], 0, ALL),
        ([TopKTopPLogitsProcessor(temperature=0.5, top_k=7), P, M], 0, ALL),
        ([TopKTopPLogitsProcessor(temperature=0.5, top_p=0.9), K], 1, only("top_k")),
        ([TopKTopPLogitsProcessor(), T], 0, only("temperature")),
    ],
)
def test_the_longest_suffix_in_order_is_fused(processors, called, stages):
    fusion = fuse_sampling(LogitsProcessorList(processors), do_sample=True)
    assert (fusion.processors or []) == processors[:called]
    assert fusion.stages == stages
    assert not fusion.greedy


def test_greedy_search_fuses_nothing():
    fusion = fuse_sampling(LogitsProcessorList([PENALTY, T, K]), do_sample=False)
    assert fusion.processors == [PENALTY, T, K]
    assert fusion.stages == {}
    assert fusion.greedy


def test_another_kind_of_list_is_called_whole():
    processors = MyList([T, K])
    fusion = fuse_sampling(processors, do_sample=True)
    assert fusion.processors is processors
    assert fusion.stages == {}


@pytest.mark.parametrize("seed", range(40))
def test_any_list_keeps_its_distribution(seed):
    """The called part followed by the op leaves the scores that the whole list gives."""
    from lmdecode.sampling.ops import top_k_top_p_sample

    rng = random.Random(seed)
    pool = [
        lambda: TemperatureLogitsWarper(rng.uniform(0.3, 2.0)),
        lambda: TopKLogitsWarper(rng.randint(1, 40), min_tokens_to_keep=rng.choice([1, 3])),
        lambda: TopPLogitsWarper(rng.uniform(0.1, 0.99), min_tokens_to_keep=rng.choice([1, 1, 3])),
        lambda: MinPLogitsWarper(rng.uniform(0.01, 0.5), min_tokens_to_keep=rng.choice([1, 1, 2])),
        lambda: RepetitionPenaltyLogitsProcessor(1.3),
        lambda: TypicalLogitsWarper(0.9),
    ]
    processors = LogitsProcessorList([rng.choice(pool)() for _ in range(rng.randint(0, 6))])
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, 50, generator=generator) * 3
    ids = torch.randint(0, 50, (4, 9), generator=generator)

    fusion = fuse_sampling(processors, do_sample=True)
    called = scores if fusion.processors is None else fusion.processors(ids, scores)
    drawn = top_k_top_p_sample(
        called, **fusion.stages, seed=seed, return_logits=True, dialect="transformers"
    )
    expected = processors(ids, scores)
    assert torch.equal(drawn.kept_logits, expected)
    assert (expected.gather(1, drawn.index[:, None]) > -math.inf).all()
