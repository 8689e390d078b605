"""Fixtures of every test."""

import pytest
import torch


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that an op runs on."""
    return torch.device(request.param)
