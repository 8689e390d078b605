"""Candidates from whole rows of log-probabilities: their order, ties, and where there are none."""

import math

import pytest
import torch

from lmdecode.integrations.transformers.beam.candidates import (
    Candidates,
    drawn_candidates,
    rank_drawn,
    top_k_candidates,
)
from lmdecode.integrations.transformers.generate_call import SORTS_DRAWN

INF = math.inf


@pytest.mark.parametrize("values", [2, 5, 1000])
@pytest.mark.parametrize("count", [1, 4, 11, 60])
def test_the_lowest_index_of_equal_scores_comes_first(values, count):
    """Few different values: the last place is contested by many."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randint(values, (3, 60), generator=generator).float()
        scores[0, ::7] = -INF
        got = top_k_candidates(scores, count, vocab_size=20)
        order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
        found = got.scores > -INF
        assert torch.equal(got.scores, scores.gather(1, order))
        assert torch.equal((got.beams * 20 + got.tokens)[found], order[found])
        assert not got.status.any()


def test_fewer_candidates_than_asked_for():
    got = top_k_candidates(torch.tensor([[1.0, -INF, 3.0, 2.0]]), 6, vocab_size=2)
    assert got.scores.tolist() == [[3.0, 2.0, 1.0, -INF, -INF, -INF]]
    assert got.tokens[0, :3].tolist() == [0, 1, 0]
    assert got.beams[0, :3].tolist() == [1, 1, 0]


def test_status_of_searches_without_candidates():
    scores = torch.tensor([[0.0, 1.0, -INF], [0.0, math.nan, 1.0], [-INF] * 3, [INF, 0.0, 0.0]])
    assert top_k_candidates(scores, 2, vocab_size=3).status.tolist() == [0, 1, 2, 4]
    done = torch.zeros(4, dtype=torch.uint8)
    assert drawn_candidates(scores, 2, 3, done).status.tolist() == [0, 1, 2, 4]
    assert not drawn_candidates(scores, 2, 3, done + 1).status.any()


def test_drawing_is_that_of_multinomial():
    scores = torch.randn(3, 40)
    torch.manual_seed(4)
    expected = torch.multinomial(scores.softmax(-1), 6)
    if SORTS_DRAWN:  # as transformers does from 5.24 on
        expected = expected.gather(1, scores.gather(1, expected).argsort(1, descending=True))
    torch.manual_seed(4)
    got = drawn_candidates(scores, 6, 10, torch.zeros(3, dtype=torch.uint8))
    assert torch.equal(got.beams * 10 + got.tokens, expected)
    assert torch.equal(got.scores, scores.gather(1, expected))


def test_the_order_of_drawn_candidates():
    """Who may close, best first; who goes on, best first; who ends too late; who is none."""
    scores = torch.tensor([[-5.0, -1.0, -2.0, -7.0, -3.0, -INF, -0.5, -4.0]])
    ends = torch.tensor([[True, False, True, False, True, True, True, False]])
    nothing = torch.zeros((1, 8), dtype=torch.int64)
    order = rank_drawn(Candidates(scores, nothing, nothing, nothing[:, 0]), ends, num_beams=3)
    assert order.tolist() == [[2, 0, 1, 7, 3, 6, 4, 5]]
