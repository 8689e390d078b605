"""``reorder_beams``, ``beam_cache`` and ``expand_beams`` on every kind of cache."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from cache_cases import (
    CACHES,
    PARENTS,
    gemma_config,
    hybrid_config,
    llama_config,
    run,
    states,
    tensors_of,
)
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer

from lmdecode.integrations.transformers import (
    BeamDynamicCache,
    BeamEncoderDecoderCache,
    beam_cache,
    expand_beams,
    reorder_beams,
)
from lmdecode.integrations.transformers.caches.beam_caches import BeamLayer, BeamSlidingWindowLayer
from tests.support.releases import BEFORE_5_4, BEFORE_5_5, BEFORE_5_23, queries


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_known_layers_take_one_call(kind: str, dtype: torch.dtype, calls) -> None:
    cache = CACHES[kind]()
    before = [tensor.clone() for tensor in tensors_of(cache)]
    places = [tensor.data_ptr() for tensor in tensors_of(cache)]
    assert reorder_beams(cache, PARENTS.to(dtype)) is None
    assert len(calls) == (1 if before else 0)
    assert [tensor.data_ptr() for tensor in tensors_of(cache)] == places
    for got, want in zip(tensors_of(cache), before, strict=True):
        assert torch.equal(got, want[PARENTS])


@pytest.mark.skipif(BEFORE_5_4, reason="static layers before transformers 5.4 count no tokens")
def test_positions_of_a_static_cache_that_are_not_in_use_stay() -> None:
    cache = StaticCache(gemma_config(), max_cache_len=9)
    run(cache, length=3)
    for layer in cache.layers:
        layer.keys[:, :, 3:] = torch.arange(4.0)[:, None, None, None]
    reorder_beams(cache, PARENTS)
    for number, layer in enumerate(cache.layers):
        assert torch.equal(layer.keys[:, :, :3], states(4, 3, number)[PARENTS])
        assert torch.equal(layer.keys[:, 0, 3, 0], torch.arange(4.0))


@pytest.mark.parametrize("cross", [DynamicCache, BeamDynamicCache])
@pytest.mark.parametrize("kind", [EncoderDecoderCache, BeamEncoderDecoderCache])
def test_cross_attention_stays(kind: type, cross: type, calls) -> None:
    cache = kind(run(DynamicCache()), run(cross()))
    before = [copy.deepcopy(half) for half in (cache.self_attention_cache, run(cross()))]
    reorder_beams(cache, PARENTS)
    assert len(calls) == 1
    for got, want in zip(
        tensors_of(cache.cross_attention_cache), tensors_of(before[1]), strict=True
    ):
        assert torch.equal(got, want)
    for got, want in zip(
        tensors_of(cache.self_attention_cache), tensors_of(before[0]), strict=True
    ):
        assert torch.equal(got, want[PARENTS])


def test_is_updated_is_that_of_transformers() -> None:
    for first, second in ((DynamicCache(), DynamicCache()), (run(DynamicCache()),) * 2):
        ours, theirs = (k(first, second) for k in (BeamEncoderDecoderCache, EncoderDecoderCache))
        assert ours.is_updated == theirs.is_updated
    ours.reset()
    assert set(ours.is_updated.values()) == {False}


@pytest.mark.parametrize("legacy", [tuple, list])
def test_tuples_of_old_models(legacy: type) -> None:
    def layer(seed: int, cross: bool) -> tuple[torch.Tensor, ...]:
        return tuple(states(4, 3, seed + i) for i in range(4 if cross else 2))

    for cross in (False, True):
        cache = legacy(layer(10 * number, cross) for number in range(2))
        reorder_beams(cache, PARENTS)
        for number in range(2):
            expected = layer(10 * number, cross)
            for i, tensor in enumerate(cache[number]):
                assert torch.equal(tensor, expected[i][PARENTS] if i < 2 else expected[i])
    reorder_beams(legacy([(None, None, None)]), PARENTS)


@pytest.mark.skipif(BEFORE_5_5, reason="before transformers 5.5 no layers keep convolutions")
def test_layers_that_are_not_known_reorder_themselves(calls) -> None:
    config = hybrid_config()
    caches = [DynamicCache(config=config), BeamDynamicCache(config=config)]
    for cache in caches:
        for number in (0, 2):
            cache.update_conv_state(states(4, 3, number)[:, 0], number)
        cache.update(states(4, 5), states(4, 5, 1), 1)
    caches[0].reorder_cache(PARENTS)
    reorder_beams(caches[1], PARENTS)
    assert [len(tensors) for tensors in calls] == [2]
    assert type(caches[1].layers[1]) is BeamLayer
    assert torch.equal(caches[0].layers[1].keys, caches[1].layers[1].keys)
    for number in (0, 2):
        got, want = (cache.layers[number].conv_states[0] for cache in caches)
        assert torch.equal(got, states(4, 3, number)[PARENTS, 0])
        assert torch.equal(got, want)


def test_indexed_layers_reorder_their_indexer_too() -> None:
    indexed = getattr(transformers.cache_utils, "DynamicIndexedLayer", None)
    if indexed is None:
        pytest.skip("this transformers has no layers with an indexer")
    cache = Cache(layers=[indexed(), DynamicLayer()])
    run(cache)
    cache.update_indexer(states(4, 5)[:, 0], 0)
    beam_cache(cache)
    reorder_beams(cache, PARENTS)
    assert torch.equal(cache.layers[0].indexer_keys, states(4, 5)[PARENTS, 0])
    for number in range(2):
        assert torch.equal(cache.layers[number].keys, states(4, 5, number)[PARENTS])


@pytest.mark.skipif(BEFORE_5_23, reason="caches before transformers 5.21 are not quantised to fp8")
def test_quantised_layers_reorder_themselves() -> None:
    ours, theirs = (
        run(transformers.QuantizedCache("fp8", llama_config()), length=5) for _ in range(2)
    )
    beam_cache(ours)
    reorder_beams(ours, PARENTS)
    theirs.reorder_cache(PARENTS)
    new = states(4, 1, 5), states(4, 1, 6)
    for number in range(2):
        for got, want in zip(ours.update(*new, number), theirs.update(*new, number), strict=True):
            assert torch.equal(got, want)


class Counting:
    """A cache of a kind that nobody knows."""

    def __init__(self) -> None:
        self.maps: list[list[int]] = []

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.maps.append(beam_idx.tolist())


class OwnOrder(DynamicCache):
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.maps = [*getattr(self, "maps", []), beam_idx.tolist()]


@pytest.mark.parametrize("kind", [Counting, OwnOrder])
def test_caches_with_a_method_of_their_own(kind: type) -> None:
    cache = kind()
    reorder_beams(cache, PARENTS)
    assert cache.maps == [PARENTS.tolist()]
    reorder_beams(cache, torch.arange(4))  # nothing to do
    assert cache.maps == [PARENTS.tolist()]
    wrapped = EncoderDecoderCache(DynamicCache(), DynamicCache())
    wrapped.self_attention_cache = cache
    reorder_beams(wrapped, PARENTS)
    assert cache.maps == [PARENTS.tolist()] * 2


class Silent:
    """As some models had them: state, and no way to reorder it."""

    is_initialized = True
    keys = values = None


UNKNOWN: dict[str, tuple[str, Callable[[], Any]]] = {
    "an object": (r"cache is of type Silent", Silent),
    "None": (r"cache is of type NoneType", lambda: None),
    "a tensor": (r"cache is of type Tensor", lambda: states(4, 3)),
    "a layer": (r"cache.layers\[1\] is of type Silent, which has no reorder_cache",
                lambda: Cache(layers=[run(DynamicCache(), 1).layers[0], Silent()])),
    "a tuple of tensors": (r"cache\[0\] holds Tensor", lambda: (states(4, 3), states(4, 3))),
    "a tuple of lists": (r"cache\[1\] holds list", lambda: ((None, None), ([1], [2]))),
    "one tensor a layer": (r"cache\[0\] holds Tensor", lambda: [(states(4, 3),)]),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_nobody_can_reorder_is_an_error(case: str) -> None:
    message, make = UNKNOWN[case]
    cache = make()
    before = copy.deepcopy(cache)
    with pytest.raises(TypeError, match=message) as raised:
        reorder_beams(cache, PARENTS)
    assert str(raised.value).startswith("reorder_beams: ")
    if isinstance(cache, Cache):
        assert torch.equal(cache.layers[0].keys, before.layers[0].keys)


def test_wrong_beam_indices() -> None:
    cache = run(BeamDynamicCache())
    with pytest.raises(TypeError, match="beam_idx is of type list"):
        reorder_beams(cache, [1, 1, 0, 3])
    for wrong in (torch.tensor([0, 1, 2, 4]), PARENTS.float()):
        for reorder in (cache.reorder_cache, cache.layers[0].reorder_cache):
            with pytest.raises(ValueError, match="parents"):
                reorder(wrong)
    with pytest.raises(ValueError, match="parents"):
        cache.layers[0].reorder_cache(torch.tensor([0, 1]))  # the cache alone can change its rows
    assert torch.equal(cache.layers[0].keys, states(4, 5))


@pytest.mark.parametrize("kind", [k for k in CACHES if "static" not in k])
def test_exchanged_layers_hold_what_they_held(kind: str) -> None:
    theirs, ours = CACHES[kind](), CACHES[kind]()
    assert beam_cache(ours, capacity=50) is ours
    assert all(isinstance(layer, (BeamLayer, BeamSlidingWindowLayer)) for layer in ours.layers)
    for step in range(8):
        new = states(4, 1, step), states(4, 1, step + 50)
        for number in range(2):
            for got, want in zip(
                ours.update(*new, number), theirs.update(*new, number), strict=True
            ):
                assert torch.equal(got, want)
        for cache in (ours, theirs):
            cache.reorder_cache(PARENTS)
        assert ours.get_mask_sizes(queries(1), 0) == theirs.get_mask_sizes(queries(1), 0)


def test_other_caches_are_left_alone() -> None:
    static = StaticCache(llama_config(), max_cache_len=9)
    layers = list(static.layers)
    assert beam_cache(static) is static and static.layers == layers
    for other in (None, ((1, 2),), Counting()):
        assert beam_cache(other) is other


@pytest.mark.parametrize("kind", [DynamicCache, BeamDynamicCache])
def test_expanded_rows_follow_their_prompts(kind: type) -> None:
    for beams, rows in (
        (3, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),
        ([2, 1, 3, 1], [0, 0, 1, 2, 2, 2, 3]),
    ):
        cache = EncoderDecoderCache(run(kind(config=llama_config())), run(DynamicCache()))
        before = [copy.deepcopy(tensors_of(half)) for half in (
            cache.self_attention_cache, cache.cross_attention_cache,
        )]  # fmt: skip
        assert expand_beams(cache, beams) is None
        for half, old in zip(
            (cache.self_attention_cache, cache.cross_attention_cache), before, strict=True
        ):
            for got, want in zip(tensors_of(half), old, strict=True):
                assert torch.equal(got, want[rows])


def test_prompts_run_once_give_the_same_logits(make_model, prompts) -> None:
    for name in ("llama", "mistral", "gemma3"):
        model = make_model(name)
        cache = BeamDynamicCache(config=model.config)
        next_ids = torch.arange(3, 15)[:, None]
        with torch.no_grad():
            model(prompts, past_key_values=cache)
            expand_beams(cache, 4)
            got = model(next_ids, past_key_values=cache).logits
            whole = torch.cat([prompts.repeat_interleave(4, dim=0), next_ids], dim=1)
            expected = model(whole).logits[:, -1:]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


WRONG_WIDTHS: dict[str, tuple[str, type[Exception], tuple[Any, Any]]] = {
    "0": (r"num_beams is 0", ValueError, (run(DynamicCache()), 0)),
    "none": (r"num_beams is \[\]", ValueError, (run(DynamicCache()), [])),
    "a float": (r"num_beams is \[1.5\]", ValueError, (run(DynamicCache()), [1.5])),
    "too few": (r"2 entries; expected 4", ValueError, (run(DynamicCache()), [2, 3])),
    "too few, equal": (r"2 entries; expected 4", ValueError, (run(DynamicCache()), [2, 2])),
    "static": (r"layers\[0\] is of type StaticLayer", TypeError,
               (run(StaticCache(llama_config(), max_cache_len=9)), 2)),
    "a tuple": (r"cache is of type tuple", TypeError, ((), 2)),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_WIDTHS)
def test_wrong_widths(case: str) -> None:
    message, error, arguments = WRONG_WIDTHS[case]
    with pytest.raises(error, match=message) as raised:
        expand_beams(*arguments)
    assert str(raised.value).startswith("expand_beams: ")
