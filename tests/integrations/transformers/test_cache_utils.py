"""``reorder_beams``, ``beam_cache`` and ``expand_beams`` on every kind of cache."""

import copy
import functools
import random
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
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lmdecode.integrations.transformers import (
    BeamDynamicCache,
    BeamEncoderDecoderCache,
    beam_cache,
    expand_beams,
    reorder_beams,
)
from lmdecode.integrations.transformers.caches import beam_caches
from lmdecode.integrations.transformers.caches.beam_caches import BeamLayer, BeamSlidingWindowLayer
from lmdecode.integrations.transformers.generate_call import CACHE
from tests.support.releases import (
    BEFORE_5_3,
    BEFORE_5_4,
    BEFORE_5_5,
    BEFORE_5_18,
    BEFORE_5_23,
    READS_DRAFTS,
    queries,
)
from tests.support.tiny_models import llama_like


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


def equal_layers(ours: Any, theirs: Any) -> bool:
    if theirs.get_seq_length() == 0:
        return ours.get_seq_length() == 0
    return (
        ours.get_seq_length() == theirs.get_seq_length()
        and torch.equal(ours.keys, theirs.keys)
        and torch.equal(ours.values, theirs.values)
        and ours.get_mask_sizes(queries(3)) == theirs.get_mask_sizes(queries(3))
    )


def one_change(choice: random.Random, rows: int, layers: list[Any], crops: bool) -> int:
    """Apply the same random change to all layers; return how many rows they have."""
    kind = choice.choice(["update"] * 6 + ["reorder"] * 3 + ["crop", "repeat", "select", "reset"])
    seed = choice.getrandbits(30)
    if kind == "update":
        length = choice.choice([1, 1, 1, 2, 5, 40, 300])
        new = states(rows, length, seed), states(rows, length, seed + 1, dim=3)
        results = [layer.update(*new) for layer in layers]
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)
    elif kind == "reorder":
        parents = torch.tensor([choice.randrange(rows) for _ in range(rows)])
        for layer in layers:
            layer.reorder_cache(parents)
    elif kind == "crop" and crops and layers[0].get_seq_length() > 4:
        for layer in layers:
            layer.crop(-choice.choice([3]))
    elif kind == "repeat" and rows < 5:
        if layers[0].get_seq_length():
            rows *= 2
        for layer in layers:
            layer.batch_repeat_interleave(2)
    elif kind == "select" and rows > 2 and layers[0].get_seq_length():
        kept = torch.tensor(sorted(choice.sample(range(rows), rows - 1)))
        rows -= 1
        for layer in layers:
            layer.batch_select_indices(kept)
    elif kind == "reset" and choice.random() < 0.3:
        for layer in layers:
            if BEFORE_5_18 and not isinstance(layer, (BeamLayer, BeamSlidingWindowLayer)):
                window = getattr(layer, "sliding_window", None)
                layer.__init__(*([window] if window else []))
            else:
                layer.reset()
    return rows


@pytest.mark.parametrize("window", [None, 2, 3, 8, 64, 100, 500])
@pytest.mark.parametrize("seed", range(12))
def test_layers_are_those_of_transformers(window: int | None, seed: int) -> None:
    choice = random.Random(seed)
    capacity = choice.choice([0, 0, 7, 1000])
    layers: list[Any]
    if window is None:
        layers = [BeamLayer(capacity), DynamicLayer()]
    else:
        layers = [BeamSlidingWindowLayer(window, capacity), DynamicSlidingWindowLayer(window)]
    rows = 3
    for _ in range(120):
        rows = one_change(choice, rows, layers, crops=window is None)
        assert equal_layers(*layers)
        if choice.random() < 0.05:
            layers[0] = copy.deepcopy(layers[0])


@READS_DRAFTS
@pytest.mark.parametrize("seed", range(6))
def test_recorded_past_can_be_rolled_back(seed: int) -> None:
    choice = random.Random(seed)
    window = choice.choice([4, 9, 70])
    layers = [BeamSlidingWindowLayer(window), DynamicSlidingWindowLayer(window)]
    for layer in layers:
        layer.activate_past_recording()
    for step in range(60):
        length = choice.choice([1, 2, 5, 30])
        new = states(2, length, step), states(2, length, step + 1000)
        for got, want in zip(*(layer.update(*new) for layer in layers), strict=True):
            assert torch.equal(got, want)
        if choice.random() < 0.5:
            removed = choice.randint(0, length)
            for layer in layers:
                layer.crop(-removed)
        assert equal_layers(*layers)


def test_a_window_of_one_holds_nothing() -> None:
    layer = BeamSlidingWindowLayer(1)
    for step in range(3):
        new = states(2, 1, step)
        assert torch.equal(layer.update(new, new)[0], new)
        assert layer.keys.shape == (2, 2, 0, 4)
        assert layer.get_mask_sizes(queries(1)) == (1, step + 1)
    layer.reorder_cache(torch.tensor([1, 1]))


@pytest.mark.parametrize("layer", [BeamLayer(), BeamSlidingWindowLayer(50)], ids=repr)
def test_a_step_writes_one_slot(layer: Any) -> None:
    """The buffer stays where it is for many steps, and rows that stay are not written."""
    layer.update(states(4, 49), states(4, 49, 1))
    places = set()
    for step in range(500):
        layer.update(states(4, 1, step), states(4, 1, step))
        places.add((layer.keys.untyped_storage().data_ptr(), layer._states["key"].buffer.shape[2]))
    assert len(places) <= 20
    before = layer.keys.clone()
    buffer = layer.keys.untyped_storage().data_ptr()
    layer.reorder_cache(torch.tensor([0, 0, 2, 3]))
    assert layer.keys.untyped_storage().data_ptr() == buffer
    assert torch.equal(layer.keys, before[[0, 0, 2, 3]])


def test_buffers_grow_geometrically() -> None:
    layer = BeamLayer()
    capacities = []
    for step in range(3000):
        layer.update(states(1, 1, step), states(1, 1, step))
        capacities.append(layer._states["key"].buffer.shape[2])
    assert len(set(capacities)) < 12
    assert capacities[-1] < 1.6 * 3000
    roomy = BeamLayer(capacity=3000)
    for step in range(3000):
        roomy.update(states(1, 1, step), states(1, 1, step))
        assert roomy._states["key"].buffer.shape[2] == 3000
    assert torch.equal(roomy.keys, layer.keys)


def test_repeated_rows_lie_in_a_buffer_with_room() -> None:
    layer = BeamLayer()
    layer.update(states(2, 10), states(2, 10, 1))
    layer.batch_repeat_interleave(3)
    place = layer.keys.untyped_storage().data_ptr()
    assert torch.equal(layer.keys, states(2, 10).repeat_interleave(3, dim=0))
    layer.update(states(6, 1), states(6, 1))
    assert layer.keys.untyped_storage().data_ptr() == place


def test_what_is_assigned_is_copied() -> None:
    """So that a reorder in place changes nobody else's tensor."""
    mine = states(1, 6).expand(3, 2, 6, 4)
    layer = BeamLayer()
    layer.update(states(3, 2), states(3, 2))
    layer.keys = mine
    layer.values = mine
    layer.update(states(3, 1, 1), states(3, 1, 2))
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    assert torch.equal(mine, states(1, 6).expand(3, 2, 6, 4))
    expected = torch.cat([mine, states(3, 1, 1)], dim=2)[[2, 2, 0]]
    assert torch.equal(layer.keys, expected)


def test_offload_and_prefetch_keep_content_and_room() -> None:
    layer = BeamLayer(capacity=100)
    layer.offload()  # nothing is there yet
    layer.update(states(2, 3), states(2, 3, 1))
    layer.offload()
    layer.prefetch()
    assert torch.equal(layer.values, states(2, 3, 1))
    assert layer._states["key"].buffer.shape[2] == 100


def test_caches_made_under_inference_mode_go_on_outside() -> None:
    layer = BeamLayer()
    with torch.inference_mode():
        layer.update(states(2, 3), states(2, 3))
    with torch.no_grad():
        layer.update(states(2, 1, 1), states(2, 1, 1))
        layer.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.keys[:, :, :3], states(2, 3).flip(0))


def filled(layer: Any) -> Any:
    layer.update(states(3, 2), states(3, 2))
    return layer


WRONG_UPDATES: dict[str, tuple[str, tuple[torch.Tensor, torch.Tensor]]] = {
    "other rows": (r"key_states .*\[1, 2, 1, 4\].*expected .*\[3, 2, 1, 4\]", (states(1, 1),) * 2),
    "other heads": (r"key_states", (states(3, 1, heads=1),) * 2),
    "other dims": (r"value_states", (states(3, 1), states(3, 1, dim=1))),
    "another dtype": (r"value_states are torch.float64", (states(3, 1), states(3, 1).double())),
    "another device": (r"key_states .* on meta", (states(3, 1).to("meta"),) * 2),
    "three dimensions": (r"key_states", (states(3, 1)[0],) * 2),
    "a gradient": (r"require a gradient", (states(3, 1).requires_grad_(),) * 2),
}


@pytest.mark.parametrize("layer", [BeamLayer, functools.partial(BeamSlidingWindowLayer, 9)])
@pytest.mark.parametrize("case", WRONG_UPDATES)
def test_wrong_updates(layer: Callable[[], Any], case: str) -> None:
    message, arguments = WRONG_UPDATES[case]
    one = filled(layer())
    with pytest.raises(ValueError, match=message) as raised:
        one.update(*arguments)
    assert str(raised.value).startswith(type(one).__name__)
    assert torch.equal(one.keys, states(3, 2)) and one.get_seq_length() == 2


DECODER_ONLY = ("gpt2", "llama", "mistral", "qwen2", "gemma2", "gemma3", "gpt_oss")
ENCODER_DECODER = ("bart", "t5", "marian")
BEAMS = {
    "num_beams": 4, "do_sample": False, "max_new_tokens": 20, "num_return_sequences": 2,
    "return_dict_in_generate": True, "output_scores": True,
}  # fmt: skip


@pytest.mark.parametrize("capacity", [0, 200])
@pytest.mark.parametrize("name", DECODER_ONLY)
def test_beams_are_those_of_the_dynamic_cache(make_model, padded_prompts, calls, name, capacity):
    model = make_model(name)
    expected = model.generate(**padded_prompts, **BEAMS)
    cache = BeamDynamicCache(config=model.config, capacity=capacity)
    got = model.generate(**padded_prompts, **BEAMS, past_key_values=cache)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores)
    assert torch.equal(got.beam_indices, expected.beam_indices)
    assert cache.get_seq_length() == expected.past_key_values.get_seq_length()
    # One call a step, for the keys and values of all layers.
    steps = got.sequences.shape[1] - padded_prompts["input_ids"].shape[1]
    assert len(calls) in (steps, steps - 1)
    assert all(len(tensors) == 2 * len(cache.layers) for tensors in calls)


@pytest.mark.skipif(BEFORE_5_3, reason="transformers has a cache of the model's own")
def test_beams_of_a_hybrid_model(prompts) -> None:
    """Convolutions beside attention: each layer follows the beams, by us or by its own method."""
    model = llama_like("Lfm2", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
    expected = model.generate(prompts, **BEAMS)
    cache = BeamDynamicCache(config=model.config)
    got = model.generate(prompts, **BEAMS, past_key_values=cache)
    assert torch.equal(got.sequences, expected.sequences)
    assert [type(layer) is BeamLayer for layer in cache.layers] == [False, True, False]


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_cross_attention_is_never_touched(make_model, padded_prompts, calls, name):
    model = make_model(name)
    expected = model.generate(**padded_prompts, **BEAMS)
    cache = BeamEncoderDecoderCache.from_config(model.config)
    got = model.generate(**padded_prompts, **BEAMS, past_key_values=cache)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores)
    assert calls
    cross = [t for layer in cache.cross_attention_cache.layers for t in (layer.keys, layer.values)]
    places = {tensor.untyped_storage().data_ptr() for tensor in cross}
    assert len(places) == len(cross) == 4
    for tensors in calls:
        assert not places & {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert all(cache.is_updated.values())


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "bart"])
def test_caches_that_generate_made(make_model, padded_prompts, monkeypatch, name):
    """With the layers exchanged in its own object, and reordered by reorder_beams."""
    model = make_model(name)
    expected = model.generate(**padded_prompts, **BEAMS)
    kind = EncoderDecoderCache if model.config.is_encoder_decoder else DynamicCache
    prepare, reordered = model._prepare_cache_for_generation, []

    def prepare_ours(generation_config, model_kwargs, *args):
        prepare(generation_config, model_kwargs, *args)
        if CACHE not in model_kwargs:  # transformers 5.0
            pytest.skip("generate() leaves it to the model to make the cache")
        assert beam_cache(model_kwargs[CACHE]) is model_kwargs[CACHE]

    def reorder(cache, beam_idx):
        reordered.append(cache)
        reorder_beams(cache, beam_idx)

    monkeypatch.setattr(model, "_prepare_cache_for_generation", prepare_ours, raising=False)
    monkeypatch.setattr(kind, "reorder_cache", reorder)
    monkeypatch.setattr(beam_caches, "_KNOWN_REORDERS", (Cache.reorder_cache, reorder))
    monkeypatch.setattr(beam_caches, "_SELF_ATTENTION_ALONE", (reorder,))
    got = model.generate(**padded_prompts, **BEAMS)
    assert torch.equal(got.sequences, expected.sequences)
    assert reordered and type(got.past_key_values) is kind
    own = getattr(got.past_key_values, "self_attention_cache", got.past_key_values)
    assert {type(layer) for layer in own.layers} <= {BeamLayer, BeamSlidingWindowLayer}
    for layer in getattr(got.past_key_values, "cross_attention_cache", Cache(layers=[])).layers:
        assert type(layer) is DynamicLayer


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_continued_prompts(make_model, prompts, name):
    """Chunks of a prompt, and a second call that goes on from the cache of the first."""
    model = make_model(name)
    results = []
    for cache in (BeamDynamicCache(config=model.config), DynamicCache(config=model.config)):
        arguments = {"do_sample": False, "past_key_values": cache}
        ids = model.generate(prompts[:1], max_new_tokens=9, prefill_chunk_size=4, **arguments)
        ids = model.generate(ids, max_new_tokens=7, **arguments)
        results.append((ids, cache.get_seq_length()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
