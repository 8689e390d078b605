"""dynamic_time_warping against plain torch."""

import pytest
import torch

from lmdecode.reference.decoder import dynamic_time_warping

op = torch.ops.lmdecode.dynamic_time_warping.default


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (4, 9), (9, 4), (7, 60), (0, 3), (3, 0)])
def test_against_the_reference(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    for cost in (
        torch.randn(shape, generator=generator),
        torch.randint(-2, 3, shape, generator=generator).float(),  # ties
        torch.randn(shape, generator=generator).masked_fill_(torch.rand(shape) < 0.2, torch.inf),
        torch.zeros(shape),
    ):
        assert op(cost).equal(dynamic_time_warping(cost))


def test_what_it_finds() -> None:
    cost = torch.ones(3, 8)
    cost[0, :2] = cost[1, 2:5] = cost[2, 5:] = -1
    assert op(cost).tolist() == [0, 2, 5]


def test_nan_ends() -> None:
    cost = torch.full((3, 4), torch.nan)
    assert op(cost).equal(dynamic_time_warping(cost))


def test_strides_are_refused() -> None:
    with pytest.raises(ValueError, match="dynamic_time_warping: cost has strides"):
        op(torch.zeros(2, 3).T)
