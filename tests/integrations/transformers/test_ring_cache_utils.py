"""The layers of ring caches against those of transformers, call by call."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import cache_utils
from transformers.cache_utils import DynamicSlidingWindowLayer
from window_models import CACHES, LLAMA_LIKE, Run, assert_equal_runs, expected, generate, prompts

from lmdecode.integrations.transformers import (
    DynamicRingCache,
    StaticRingCache,
    beam_search,
    reorder_beams,
    sample,
)
from lmdecode.integrations.transformers.caches.beam_layers import BeamLayer
from lmdecode.integrations.transformers.caches.ring_caches import RingLayer, _FixedLayer
from lmdecode.integrations.transformers.caches.ring_states import RingStates
from tests.support.releases import BEFORE_5_3, IN_PARTS, MAX_LENGTH, READS_DRAFTS, queries
from tests.support.tiny_models import seeded_model

BATCH, HEADS, SIZE, VALUE_SIZE, WINDOW = 3, 2, 4, 6, 8
LENGTHS = [[1] * 30, [5, 1, 1, 1, 9, 1, 1, 30, 1], [40, 1, 1, 2, 3, 1], [7, 1, 1], [8, 1], [9, 1]]


def states(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + count)
    return (
        torch.randn(BATCH, HEADS, count, SIZE, generator=generator),
        torch.randn(BATCH, HEADS, count, VALUE_SIZE, generator=generator),
    )


def pair() -> tuple[RingLayer, DynamicSlidingWindowLayer]:
    return RingLayer(WINDOW), DynamicSlidingWindowLayer(WINDOW)


def assert_same(ours: RingLayer, theirs: DynamicSlidingWindowLayer) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length() == ours.cumulative_length
    assert getattr(ours, MAX_LENGTH)() == getattr(theirs, MAX_LENGTH)()
    for count in (1, 2, 9):
        assert ours.get_mask_sizes(queries(count)) == theirs.get_mask_sizes(queries(count))
    if ours.get_seq_length():
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def update_both(ours: RingLayer, theirs: DynamicSlidingWindowLayer, count: int, seed: int) -> None:
    """Write the same tokens, and compare what comes back."""
    sizes = ours.get_mask_sizes(queries(count))
    got, want = ours.update(*states(count, seed)), theirs.update(*states(count, seed))
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other) and one.shape[2] == sizes[0]
    assert_same(ours, theirs)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_updates(lengths: list[int]) -> None:
    ours, theirs = pair()
    assert_same(ours, theirs)
    for seed, count in enumerate(lengths):
        update_both(ours, theirs, count, seed)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_rows(lengths: list[int]) -> None:
    for change in (
        lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])),
        lambda layer: layer.batch_select_indices(torch.tensor([2, 1, 1])),
        lambda layer: (
            layer.batch_repeat_interleave(2),
            layer.batch_select_indices(torch.tensor([5, 0, 2])),
        ),
    ):
        ours, theirs = pair()
        change(ours), change(theirs)  # nothing to do yet
        for seed, count in enumerate(lengths):
            update_both(ours, theirs, count, seed)
            change(ours), change(theirs)
            assert_same(ours, theirs)


@READS_DRAFTS
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_crop_while_the_past_is_recorded(lengths: list[int], late: bool) -> None:
    ours, theirs = pair()
    if late:
        update_both(ours, theirs, 3, 77)
    for layer in (ours, theirs):
        layer.activate_past_recording()
    for seed, count in enumerate(lengths):
        ours.update(*states(count, seed)), theirs.update(*states(count, seed))
        remove = min(count, 20) * (seed % 3) // 2
        for layer in (ours, theirs):
            layer.crop(-remove)
        assert_same(ours, theirs)


@READS_DRAFTS
@pytest.mark.parametrize("remove", [0, 1, 70, 100, 139, 140])
def test_crop_of_a_prompt_that_came_with_a_draft(remove: int) -> None:
    """As prompt lookup has it: more than the ring's spare slots, in the first chunk."""
    ours, theirs = pair()
    for layer in (ours, theirs):
        layer.activate_past_recording()
        layer.update(*states(140, 1))
        layer.crop(-remove)
    assert_same(ours, theirs)
    for layer in (ours, theirs):
        layer.update(*states(3, 2))
        layer.crop(-1)
    assert_same(ours, theirs)
    with pytest.raises(ValueError, match=f"rollback: num_tokens is {143 - remove}"):
        ours.crop(remove - 143)


@READS_DRAFTS
@pytest.mark.parametrize("remove", [0, 64, 89, 90])
def test_crop_of_a_draft_that_is_longer_than_the_spare_slots(remove: int) -> None:
    """Behind a prompt: the ring grows before it is written."""
    ours, theirs = pair()
    for layer in (ours, theirs):
        layer.activate_past_recording()
        layer.update(*states(30, 1))
        layer.update(*states(90, 2))
        layer.crop(-remove)
    assert_same(ours, theirs)


def test_crop_beyond_what_is_held() -> None:
    layer = RingLayer(WINDOW)
    layer.crop(-3)  # not in use: nothing to do, as in transformers
    layer.update(*states(30))
    with pytest.raises(ValueError, match="rollback: num_tokens is 2; expected at most 0"):
        layer.crop(-2)
    with pytest.raises(ValueError, match="tokens_to_remove is 2; expected 0 or less"):
        layer.crop(2)
    assert torch.equal(layer.keys, states(30)[0][:, :, -7:])


def test_a_step_writes_one_slot_and_copies_nothing() -> None:
    layer = RingLayer(WINDOW)
    layer.update(*states(20))
    ring = layer.ring
    where = ring._keys.data_ptr(), ring._values.data_ptr()
    for seed in range(20):
        before = ring._keys.clone()
        keys, values = layer.update(*states(1, seed))
        assert isinstance(keys, RingStates) and isinstance(values, RingStates)
        assert keys.ring is ring and where == (ring._keys.data_ptr(), ring._values.data_ptr())
        changed = (ring._keys != before).any(-1).any(1).any(0)
        assert changed.nonzero().flatten().tolist() == [(20 + seed) % WINDOW]
    assert ring.capacity == WINDOW


def test_reset_and_another_batch() -> None:
    for keeps_memory in (False, True):
        layer = RingLayer(WINDOW, keeps_memory=keeps_memory)
        layer.update(*states(20))
        ring = layer.ring
        layer.reset()
        assert layer.get_seq_length() == 0
        layer.update(*states(3, 1))
        assert (layer.ring is ring) == keeps_memory
        assert torch.equal(layer.keys, states(3, 1)[0])
    layer = RingLayer(WINDOW)
    layer.update(*states(20))
    layer.reset()
    layer.update(*(tensor[:1] for tensor in states(3)))
    assert layer.keys.shape[0] == 1


def test_states_are_in_order_for_whoever_uses_them() -> None:
    layer, seen = RingLayer(WINDOW), []
    for seed in range(15):
        seen.append(states(1, seed))
        keys, values = layer.update(*seen[-1])
    want = torch.cat([k for k, _ in seen], 2)[:, :, -WINDOW:]
    assert keys.shape == want.shape and keys.dtype == want.dtype and keys.dim() == 4
    assert torch.equal(keys, want) and torch.equal(torch.cat([keys, keys], 2)[:, :, :8], want)
    assert torch.equal(keys[:, :1].transpose(2, 3), want[:, :1].mT)
    assert torch.equal(want @ keys.mT, want @ want.mT)
    assert type(keys + 0) is torch.Tensor
    assert torch.equal(values, torch.cat([v for _, v in seen], 2)[:, :, -WINDOW:])


def test_states_that_are_out_of_date_are_refused() -> None:
    layer = RingLayer(WINDOW)
    layer.update(*states(3))
    old, _ = layer.update(*states(1))
    layer.update(*states(1))
    with pytest.raises(RuntimeError, match="of token 4 were read after token 5 had been written"):
        old.shape  # noqa: B018


def test_wrong_states_are_refused() -> None:
    layer = RingLayer(WINDOW)
    layer.update(*states(12))
    before = layer.keys
    k, v = states(1)
    for wrong, message in (
        ((k[:2], v[:2]), "key_states has 2 rows of torch.float32; expected 3 of torch.float32"),
        ((k, v[:2]), "v has shape"),
        ((k.half(), v.half()), "has 3 rows of torch.float16; expected 3 of torch.float32"),
        ((k, v[..., :3]), "v has shape"),
        ((k.clone().requires_grad_(), v), "k requires a gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.update(*wrong)
        assert torch.equal(layer.keys, before) and layer.get_seq_length() == 12


def config(**options: Any) -> Any:
    return transformers.Gemma2Config(
        num_hidden_layers=3, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], **options,
    )  # fmt: skip


def test_the_layers_of_a_cache() -> None:
    dynamic, static = DynamicRingCache(config()), StaticRingCache(config(), 50)
    assert [type(layer) for layer in dynamic.layers] == [RingLayer, BeamLayer, RingLayer]
    assert [type(layer) for layer in static.layers] == [RingLayer, _FixedLayer, RingLayer]
    assert dynamic.is_sliding == static.is_sliding == [True, False, True]
    assert not dynamic.is_compileable and not static.is_compileable
    assert static.layers[1].get_max_length() == 50
    short = StaticRingCache(config(), WINDOW)
    assert [type(layer) for layer in short.layers] == [_FixedLayer] * 3


@pytest.mark.skipif(BEFORE_5_3, reason="transformers has a cache of the model's own")
def test_layers_of_other_kinds_stay() -> None:
    lfm = transformers.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"])
    for cache in (DynamicRingCache(lfm), StaticRingCache(lfm, 9)):
        assert isinstance(cache.layers[0], cache_utils.LinearAttentionLayer)
        assert isinstance(cache.layers[1], BeamLayer)


def test_all_layers_follow_the_beams() -> None:
    for cache in (DynamicRingCache(config()), StaticRingCache(config(), 50)):
        for seed in range(12):
            for number in range(3):
                cache.update(*states(1, 10 * number + seed), number)
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        rows = torch.tensor([1, 1, 0])
        for reorder in (cache.reorder_cache, lambda rows, c=cache: reorder_beams(c, rows)):
            reorder(rows)
            before = [(keys[rows], values[rows]) for keys, values in before]
            for layer, (keys, values) in zip(cache.layers, before, strict=True):
                assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_a_static_cache_has_one_allocation_and_an_end() -> None:
    cache = StaticRingCache(config(), 100)
    pointers = set()
    for seed in range(100):
        for number in range(3):
            cache.update(*states(1, seed), number)
        pointers.add(tuple(layer.ring._keys.data_ptr() for layer in cache.layers[::2]))
        pointers.add((cache.layers[1].keys.untyped_storage().data_ptr(),))
    assert len(pointers) == 2
    with pytest.raises(ValueError, match="would have 101 tokens; expected at most 100"):
        cache.update(*states(1), 1)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.layers[1].get_seq_length() == 0
    keys, _ = cache.update(*states(4), 1)
    assert keys.untyped_storage().data_ptr() in {p for pointer in pointers for p in pointer}


@pytest.mark.parametrize("length", [0, -1])
def test_a_static_cache_of_no_length(length: int) -> None:
    with pytest.raises(ValueError, match=f"max_cache_len is {length}; expected at least 1"):
        StaticRingCache(config(), length)
    with pytest.raises(TypeError, match="max_cache_len is of type float"):
        StaticRingCache(config(), 10.0)


def test_a_cache_needs_the_config_of_a_model() -> None:
    model = torch.nn.Linear(1, 1)
    for wrong, kind in ((None, "NoneType"), (model, "Linear"), ({"sliding_window": 8}, "dict")):
        message = f"config is of type {kind}; expected the config of a model, model.config"
        with pytest.raises(TypeError, match=f"DynamicRingCache: {message}"):
            DynamicRingCache(wrong)
        with pytest.raises(TypeError, match=f"StaticRingCache: {message}"):
            StaticRingCache(wrong, 10)


@pytest.mark.skipif(BEFORE_5_3, reason="DynamicCache itself fails")
def test_a_window_below_1() -> None:
    none = config()
    none.sliding_window = 0
    for cache in (DynamicRingCache, lambda config: StaticRingCache(config, 9)):
        with pytest.raises(ValueError, match="sliding_window is 0; expected at least 1"):
            cache(none)


def test_a_cache_can_be_copied() -> None:
    """As generate() does with the cache of a prompt that is used again."""
    cache = DynamicRingCache(config())
    for number in range(3):
        cache.update(*states(20), number)
    other = copy.deepcopy(cache)
    for number in range(3):
        cache.update(*states(5), number)
    assert other.get_seq_length() == 20
    assert torch.equal(other.layers[0].keys, states(20)[0][:, :, -7:])


WINDOWED = ("Qwen3", "Mistral", "Gemma2", "Gemma3", "GptOss")
RINGS = ("dynamic ring", "static ring")
Build = Callable[[str, str], Any]


@IN_PARTS
@pytest.mark.parametrize("cache", [c for c in CACHES if c != "none"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma3", "GptOss"])
def test_prefill_in_chunks(build: Build, name: str, cache: str) -> None:
    """Chunks longer than the window, and the rest of them; rows that begin in a later one."""
    got = generate(build(name, "lmdecode"), cache, prefill_chunk_size=7)
    assert_equal_runs(got, expected(name, 1))


@pytest.mark.parametrize("cache", RINGS)
@pytest.mark.parametrize("name", WINDOWED)
def test_our_loops(build: Build, name: str, cache: str) -> None:
    model = build(name, "lmdecode")
    for num_beams, loop in ((1, sample), (3, beam_search)):
        got = model.generate(
            **prompts(), max_new_tokens=130, min_new_tokens=130, do_sample=False,
            num_beams=num_beams, custom_generate=loop, **CACHES[cache](model.config),
        )  # fmt: skip
        assert torch.equal(got, expected(name, num_beams).sequences)


@pytest.mark.parametrize("cache", RINGS)
@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.slow
def test_assisted_generation(build: Build, name: str, cache: str) -> None:
    """Most tokens of the assistant are refused, some are not; both models have a ring to crop."""
    ids = prompts((0,))["input_ids"]
    model = build(name, "lmdecode")
    assistant = build("Mistral" if name != "Mistral" else "Qwen3", "lmdecode")
    assistant.generation_config.num_assistant_tokens = 9
    got = model.generate(
        ids, max_new_tokens=130, do_sample=False, eos_token_id=None, assistant_model=assistant,
        **CACHES[cache](model.config),
    )  # fmt: skip
    model.set_attn_implementation("eager")
    want = model.generate(ids, max_new_tokens=130, do_sample=False, eos_token_id=None)
    assert torch.equal(got, want)


@pytest.mark.parametrize("length", [1, 4, 5, 6, 10, 11])
@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_prompts_around_the_window(build: Build, name: str, length: int) -> None:
    inputs = prompts((0, length // 2), length)
    options = {"max_new_tokens": 20, "do_sample": False}
    want = build(name, "eager").generate(**inputs, **options)
    model = build(name, "lmdecode")
    for cache in RINGS:
        got = model.generate(**inputs, **options, **CACHES[cache](model.config))
        assert torch.equal(got, want), cache


@pytest.mark.parametrize("window", [1, 2, 1000])
def test_windows_of_one_key_and_of_more_than_there_are(window: int) -> None:
    """With a window of 1, the cache of transformers keeps everything: without one it is right."""
    model = seeded_model("MistralForCausalLM", 3, **{**LLAMA_LIKE, "sliding_window": window})
    options = {**prompts(), "max_new_tokens": 30, "do_sample": False}
    want = model.generate(**options, use_cache=False)
    model.set_attn_implementation("lmdecode")
    for cache in CACHES:
        got = model.generate(**options, **CACHES[cache](model.config))
        assert torch.equal(got, want), cache


def test_a_conversation_goes_on_from_its_cache(build: Build) -> None:
    """A second ``generate()`` gets the cache of the first, and all tokens so far."""
    model = build("Gemma3", "lmdecode")
    options = {"max_new_tokens": 15, "min_new_tokens": 15, "do_sample": False}
    ids = prompts((0, 0))["input_ids"]
    more = prompts((0, 0), 12)["input_ids"].flip(1)
    for cache in (DynamicRingCache(model.config), StaticRingCache(model.config, 100)):
        first = model.generate(ids, past_key_values=cache, **options)
        second = model.generate(torch.cat([first, more], 1), past_key_values=cache, **options)
        model.set_attn_implementation("eager")
        assert torch.equal(model.generate(ids, **options), first)
        assert torch.equal(model.generate(torch.cat([first, more], 1), **options), second)
        model.set_attn_implementation("lmdecode")


@pytest.mark.slow
def test_a_static_cache_in_a_compiled_forward(build: Build) -> None:
    """Transformers' own static cache: of one shape, whatever the number of tokens."""
    model = build("Mistral", "lmdecode")
    config = transformers.CompileConfig(backend="eager", fullgraph=False, mode=None)
    config._compile_all_devices = True
    compiled: list[Any] = []
    original = model.get_compiled_call

    def watch(compile_config: Any) -> Any:
        compiled.append(compile_config)
        return original(compile_config)

    model.get_compiled_call = watch
    try:
        got = model.generate(
            **prompts(), max_new_tokens=20, min_new_tokens=20, do_sample=False,
            cache_implementation="static", compile_config=config,
        )  # fmt: skip
    finally:
        del model.get_compiled_call
        torch._dynamo.reset()
    assert compiled
    want = expected("Mistral", 1).sequences
    assert torch.equal(got, want[:, : got.shape[1]])


def test_beams_that_changed_places_are_seen() -> None:
    """The comparison of these tests takes no other beam, and no other place, for the same."""
    want = expected("Mistral", 3)
    assert_equal_runs(want, want, 3)
    order = torch.tensor([1, 0, *range(2, 9)])
    ids, logits = list(want.ids), list(want.logits)
    ids[50], logits[50] = ids[50][order], logits[50][order]
    with pytest.raises(AssertionError, match=r"\(50, 0, 1\)"):
        assert_equal_runs(Run(want.sequences, ids, logits), want, 3)
    logits[50] = want.logits[50]
    with pytest.raises(AssertionError, match=r"\(50, tensor"):
        assert_equal_runs(Run(want.sequences, ids, logits), want, 3)
