"""The reference's search for int4 groups, once for each weight: models multiply by each often."""

from collections.abc import Iterator

import pytest
import torch

from lmdecode.reference import linear

Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def quantized_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep what ``quantize_groups`` gave for the same bytes."""
    quantize, known = linear.quantize_groups, dict[tuple[object, ...], Groups]()

    def quantize_once(weight: torch.Tensor, group_size: int = 32) -> Groups:
        key = (weight.shape, group_size, weight.numpy().tobytes())
        if key not in known:
            known[key] = quantize(weight, group_size)
        return known[key]

    monkeypatch.setattr(linear, "quantize_groups", quantize_once)
    yield
