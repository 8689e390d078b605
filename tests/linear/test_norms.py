"""``layer_norm`` and ``rms_norm`` against their references."""

import itertools

import pytest
import torch

import lmdecode
from lmdecode.reference import layer_norm as layer_norm_reference
from lmdecode.reference import rms_norm as rms_norm_reference
from tests.linear.linear_cases import assert_same_bits, normal


@pytest.mark.parametrize("size", [1, 2, 7, 16, 31, 32, 33, 100, 512, 1000, 5000])
@pytest.mark.parametrize("rows", [1, 5])
def test_reference(size: int, rows: int) -> None:
    x, weight, bias = normal(rows, size) * 3 + 2, normal(size, seed=1), normal(size, seed=2)
    close = {"rtol": 2e-6, "atol": 3e-6}
    for arguments in ((), (weight,), (None, bias), (weight, bias)):
        got, want = lmdecode.layer_norm(x, *arguments), layer_norm_reference(x, *arguments)
        torch.testing.assert_close(got, want, **close)
    for arguments in ((), (weight,)):
        got, want = lmdecode.rms_norm(x, *arguments), rms_norm_reference(x, *arguments)
        torch.testing.assert_close(got, want, **close)


def test_eps() -> None:
    x = normal(3, 40) * 1e-3
    for eps in (0.0, 1e-12, 1e-6, 1.0):
        torch.testing.assert_close(
            lmdecode.layer_norm(x, eps=eps), layer_norm_reference(x, eps=eps), rtol=2e-6, atol=2e-6
        )
        torch.testing.assert_close(
            lmdecode.rms_norm(x, eps=eps), rms_norm_reference(x, eps=eps), rtol=2e-6, atol=2e-6
        )
    zeros = torch.zeros(2, 8)
    assert not lmdecode.layer_norm(zeros).any() and not lmdecode.rms_norm(zeros).any()
    assert lmdecode.rms_norm(zeros, eps=0.0).isnan().all()


def test_a_mean_far_from_zero() -> None:
    """The variance is of what is left of the mean: a difference of squares would have no digits."""
    x = normal(2, 300) + 4000
    torch.testing.assert_close(
        lmdecode.layer_norm(x), layer_norm_reference(x), rtol=1e-3, atol=1e-3
    )


def test_dimensions() -> None:
    x, weight, bias = normal(2000, 333), normal(333, seed=1), normal(333, seed=2)
    for norm in (lambda x: lmdecode.layer_norm(x, weight, bias), lambda x: lmdecode.rms_norm(x)):
        want = norm(x)
        assert_same_bits(norm(x.view(20, 100, 333)), want.view(20, 100, 333))
        assert_same_bits(norm(x[1]), want[1])


def test_strides() -> None:
    x, weight, bias = normal(2, 3, 4, 33), normal(2, 33, seed=1), normal(33, 2, seed=2)
    for norm in (
        lambda x: lmdecode.layer_norm(x, weight[1], bias[:, 1]),
        lambda x: lmdecode.rms_norm(x, bias[:, 0]),
    ):
        want = norm(x)
        for order in itertools.permutations(range(4)):
            back = sorted(range(4), key=order.__getitem__)
            assert_same_bits(norm(x.permute(order).contiguous().permute(back)), want)
        assert_same_bits(norm(x[:, 1:2, ::2]), want[:, 1:2, ::2])
        assert_same_bits(norm(x[:, ::2]), want[:, ::2])
        assert_same_bits(norm(x[:1].expand(3, -1, -1, -1)), want[:1].expand(3, -1, -1, -1))
        assert_same_bits(norm(x[0, 0, 0].expand(5, 2, 33)), want[0, 0, 0].expand(5, 2, 33))


def test_nan_and_inf_stay_in_their_row() -> None:
    x = normal(4, 50)
    x[1, 3], x[2, 3] = float("nan"), float("inf")
    for norm in (lmdecode.layer_norm, lmdecode.rms_norm):
        got = norm(x)
        assert got[1].isnan().all() and got[2, 3].isnan()
        assert got[[0, 3]].isfinite().all()


def test_empty() -> None:
    for norm in (lmdecode.layer_norm, lmdecode.rms_norm):
        assert norm(torch.empty(0, 5)).shape == (0, 5)
        assert norm(torch.empty(3, 0)).shape == (3, 0)
        assert norm(torch.empty(3, 0, 2, 5).permute(2, 1, 0, 3)).shape == (2, 0, 3, 5)
