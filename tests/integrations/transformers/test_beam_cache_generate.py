"""Caches for beam search in ``generate()``: the beams are those of transformers' own."""

import pytest
import torch
import transformers
from cache_cases import hybrid_config
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from lmdecode.integrations.transformers import (
    BeamDynamicCache,
    BeamEncoderDecoderCache,
    beam_cache,
    reorder_beams,
)
from lmdecode.integrations.transformers.caches import beam_caches
from lmdecode.integrations.transformers.caches.beam_caches import BeamLayer, BeamSlidingWindowLayer
from lmdecode.integrations.transformers.generate_call import CACHE
from tests.support.releases import BEFORE_5_3

DECODER_ONLY = ("gpt2", "llama", "mistral", "qwen2", "gemma2", "gemma3", "gpt_oss")
ENCODER_DECODER = ("bart", "t5", "marian")
BEAMS = {
    "num_beams": 4,
    "do_sample": False,
    "max_new_tokens": 20,
    "num_return_sequences": 2,
    "return_dict_in_generate": True,
    "output_scores": True,
}


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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.Lfm2ForCausalLM(hybrid_config()).eval()
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
