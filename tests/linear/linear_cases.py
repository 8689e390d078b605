"""Inputs and comparisons of the linear tests."""

import torch


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype == torch.float32
    same = (got.contiguous().view(torch.int32) == want.contiguous().view(torch.int32)) | (
        got.isnan() & want.isnan()
    )
    assert same.all(), f"{(~same).sum()} of {same.numel()} differ"
