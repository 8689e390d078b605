"""What ``generate()`` offers beside its plain loops, on the ring caches, against eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from window_models import CACHES, LLAMA_LIKE, Run, assert_equal_runs, expected, generate, prompts

from lmdecode.integrations.transformers import (
    DynamicRingCache,
    StaticRingCache,
    beam_search,
    sample,
)
from tests.support.releases import IN_PARTS

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
    torch.manual_seed(3)
    config = transformers.MistralConfig(**{**LLAMA_LIKE, "sliding_window": window})
    model = transformers.MistralForCausalLM(config).eval()
    options = {**prompts(), "max_new_tokens": 30, "do_sample": False}
    want = model.generate(**options, use_cache=False)
    model.set_attn_implementation("lmdecode")
    for cache in CACHES:
        got = model.generate(**options, **CACHES[cache](config))
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
