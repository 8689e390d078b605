"""Layers of the caches for beam search: equal to transformers' own, and written in place."""

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_cases import states
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lmdecode.integrations.transformers.caches.beam_caches import BeamLayer, BeamSlidingWindowLayer
from tests.support.releases import BEFORE_5_18, READS_DRAFTS, queries


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
