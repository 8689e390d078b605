"""``reorder_beams`` where requests come and go: more or fewer rows than before."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from lmdecode.integrations.transformers import BeamDynamicCache, reorder_beams

CACHES = (DynamicCache, BeamDynamicCache)


def filled(cache, rows: int, tokens: int = 5):
    """Return the cache with two layers of random keys and values, and these keys."""
    keys = [torch.randn(rows, 2, tokens, 4) for _ in range(2)]
    for number, key in enumerate(keys):
        cache.update(key.clone(), -key, number)
    return cache, keys


@pytest.mark.parametrize("kind", CACHES)
def test_rows_widen_and_leave(kind) -> None:
    cache, keys = filled(kind(), rows=3)
    wider, fewer = torch.tensor([0, 0, 2, 2, 1]), torch.tensor([4, 1])
    reorder_beams(cache, wider)
    reorder_beams(cache, fewer)
    token = torch.randn(2, 2, 1, 4)
    for number, key in enumerate(keys):
        expected = torch.cat((key[wider][fewer], token), dim=2)
        updated_keys, updated_values = cache.update(token, -token, number)
        assert torch.equal(updated_keys, expected)
        assert torch.equal(updated_values, -expected)


@pytest.mark.parametrize("kind", CACHES)
def test_all_rows_leave(kind) -> None:
    cache, _ = filled(kind(), rows=3)
    reorder_beams(cache, torch.tensor([], dtype=torch.int64))
    assert cache.layers[1].keys.shape[0] == 0


def test_cross_attention_follows_the_rows() -> None:
    own, _ = filled(BeamDynamicCache(), rows=2)
    cross, keys = filled(DynamicCache(), rows=2, tokens=7)
    cache = EncoderDecoderCache(own, cross)
    parents = torch.tensor([1, 1, 0])
    reorder_beams(cache, parents)
    assert torch.equal(cache.cross_attention_cache.layers[0].keys, keys[0][parents])


@pytest.mark.parametrize("row", [-1, 3])
def test_rows_that_are_not_there(row: int) -> None:
    cache, keys = filled(BeamDynamicCache(), rows=3)
    with pytest.raises(ValueError, match=rf"beam_idx has {row}; expected 0 to 2"):
        reorder_beams(cache, torch.tensor([0, row]))
    assert torch.equal(cache.layers[0].keys, keys[0])


def test_a_tuple_cannot_change_its_rows() -> None:
    layers = ((torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)),)
    with pytest.raises(ValueError, match="beam_idx has 3 rows; expected 2"):
        reorder_beams(layers, torch.tensor([0, 1, 1]))
