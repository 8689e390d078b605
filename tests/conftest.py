"""Fixtures of every test."""

from collections.abc import Iterator

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


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the thread count."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
