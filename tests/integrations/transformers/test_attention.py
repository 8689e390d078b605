"""``attn_implementation="lmdecode"`` against eager attention, with every cache."""

import ast
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Cache, DynamicCache, StaticCache
from transformers.masking_utils import causal_mask_function, sdpa_mask
from window_models import (
    CACHES,
    LLAMA_LIKE,
    MODELS,
    WINDOW,
    assert_equal_runs,
    expected,
    generate,
    prompts,
)

from lmdecode.integrations.transformers import DynamicRingCache, StaticRingCache, attention
from lmdecode.integrations.transformers.caches.ring_states import RingStates
from tests.support.releases import BEFORE_5_3, READS_DRAFTS
from tests.support.tiny_models import seeded_model


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("cache", [c for c in CACHES if c != "none"])
@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_the_tokens_of_eager(
    build: Callable[[str, str], Any], name: str, cache: str, num_beams: int
) -> None:
    want = expected(name, num_beams)
    got = generate(build(name, "lmdecode"), cache, num_beams=num_beams)
    assert_equal_runs(got, want, num_beams)


@pytest.mark.parametrize("name", MODELS)
def test_generate_without_a_cache(build: Callable[[str, str], Any], name: str) -> None:
    want = generate(build(name, "eager"), "none", 12)
    assert_equal_runs(generate(build(name, "lmdecode"), "none", 12), want)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("cache", ["dynamic ring", "static ring"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_other_implementations_get_the_ring_in_order(
    build: Callable[[str, str], Any], name: str, implementation: str, cache: str, num_beams: int
) -> None:
    got = generate(build(name, implementation), cache, num_beams=num_beams)
    assert_equal_runs(got, expected(name, num_beams), num_beams)


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_without_padding(build: Callable[[str, str], Any], name: str) -> None:
    ids = prompts((0, 0))["input_ids"]
    want = build(name, "eager").generate(ids, max_new_tokens=40, do_sample=False)
    model = build(name, "lmdecode")
    for cache in CACHES:
        options = CACHES[cache](model.config)
        got = model.generate(ids, max_new_tokens=40, do_sample=False, **options)
        assert torch.equal(got, want), cache


@READS_DRAFTS
@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
@pytest.mark.parametrize("candidates", [3, 90])
def test_speculation_rolls_the_ring_back(
    build: Callable[[str, str], Any], name: str, candidates: int
) -> None:
    """More candidates than there are spare slots, too."""
    ids = prompts((0,))["input_ids"].repeat(1, 3)
    options = {"max_new_tokens": 100, "do_sample": False}
    want = build(name, "eager").generate(ids, **options)
    model = build(name, "lmdecode")
    got = model.generate(
        ids, prompt_lookup_num_tokens=candidates, max_matching_ngram_size=1,
        past_key_values=DynamicRingCache(model.config), **options,
    )  # fmt: skip
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Logits as far from float32 as those of eager are."""
    model = seeded_model("MistralForCausalLM", 3, **{**LLAMA_LIKE, "sliding_window": WINDOW})
    ids = prompts((0, 0), 40)["input_ids"]
    with torch.no_grad():
        want = model(ids).logits
        model.to(dtype)
        errors = {}
        for implementation in ("eager", "lmdecode"):
            model.set_attn_implementation(implementation)
            errors[implementation] = (model(ids).logits.float() - want).abs().max()
    assert errors["lmdecode"] < 2 * errors["eager"]


LENGTHS = [1, 3, 1, 20, 1, 1, 2, 7, 90, 1]


@pytest.mark.parametrize(
    "cache",
    [
        DynamicRingCache,
        lambda config: StaticRingCache(config, 200),
        lambda config: DynamicCache(config=config),
        lambda config: StaticCache(config, 200),
    ],
    ids=["dynamic ring", "static ring", "dynamic", "static"],
)
@pytest.mark.parametrize("implementation", ["lmdecode", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_chunks(
    build: Callable[[str, str], Any], name: str, implementation: str, cache: Callable[[Any], Cache]
) -> None:
    inputs = prompts((0, 11), sum(LENGTHS))
    with torch.no_grad():
        want = build(name, "eager")(**inputs).logits
        model = build(name, implementation)
        past, at, logits = cache(model.config), 0, []
        for length in LENGTHS:
            out = model(
                inputs["input_ids"][:, at : at + length],
                attention_mask=inputs["attention_mask"][:, : at + length],
                past_key_values=past,
            )
            at += length
            logits.append(out.logits)
    tokens = inputs["attention_mask"].bool()
    torch.testing.assert_close(torch.cat(logits, 1)[tokens], want[tokens], atol=1e-4, rtol=0)


AUTOCAST: dict[str, Callable[[Any], Cache]] = {
    "dynamic ring": DynamicRingCache,
    "static ring": lambda config: StaticRingCache(config, 200),
    "dynamic": lambda config: DynamicCache(config=config),
}


@pytest.mark.parametrize("cache", AUTOCAST)
@pytest.mark.parametrize("implementation", ["lmdecode", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_autocast(
    build: Callable[[str, str], Any], name: str, implementation: str, cache: str
) -> None:
    """Keys, which are rotated, come in float32 there, and values in bfloat16."""
    inputs = prompts((0, 11), sum(LENGTHS))
    tokens = inputs["attention_mask"].bool()
    errors = {}
    with torch.no_grad():
        want = build(name, "eager")(**inputs).logits[tokens]
        for kind, of_model in (("dynamic", "eager"), (cache, implementation)):
            model = build(name, of_model)
            past, at, logits = AUTOCAST[kind](model.config), 0, []
            for length in LENGTHS:
                with torch.autocast("cpu", torch.bfloat16):
                    out = model(
                        inputs["input_ids"][:, at : at + length],
                        attention_mask=inputs["attention_mask"][:, : at + length],
                        past_key_values=past,
                    )
                at += length
                logits.append(out.logits.float())
            distances = (torch.cat(logits, 1)[tokens] - want).abs().amax(-1)
            errors[kind, of_model] = distances.median()  # a token may be sent to other experts
    assert errors[cache, implementation] < 1.5 * errors["dynamic", "eager"]


@pytest.mark.parametrize("name", ["Mistral", "Gemma3", "Llama"])
def test_padding_on_the_right(build: Callable[[str, str], Any], name: str) -> None:
    inputs = prompts((0, 0), 30)
    inputs["attention_mask"][1, 20:] = 0
    with torch.no_grad():
        want = build(name, "eager")(**inputs).logits
        got = build(name, "lmdecode")(**inputs).logits
    tokens = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[tokens], want[tokens], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["Mistral", "Gemma3", "Llama"])
def test_packed_sequences_stay_apart(build: Callable[[str, str], Any], name: str) -> None:
    ids = prompts((0,), 40)["input_ids"]
    positions = torch.tensor([[*range(17), *range(23)]])
    with torch.no_grad():
        want = build(name, "eager")(ids, position_ids=positions, use_cache=False).logits
        got = build(name, "lmdecode")(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_mask_of_the_caller_alone_decides(
    build: Callable[[str, str], Any], kind: str, cached: bool
) -> None:
    ids = prompts((0, 0), 12)["input_ids"]
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(2, 1, 12, 12, generator=generator) < 0.5
    mask = mask.tril() | torch.eye(12, dtype=torch.bool)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = build("Mistral", "eager")(ids, attention_mask=additive).logits
        model = build("Mistral", "lmdecode")
        given = mask if kind == "bool" else additive
        past = DynamicRingCache(model.config) if cached else None
        got = model(ids, attention_mask=given, past_key_values=past).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_chunked_attention_is_no_window(build: Callable[[str, str], Any]) -> None:
    """Chunks share the cache layers of windows, and the argument that says how long they are."""
    common: dict[str, Any] = dict(
        batch_size=1, q_length=9, kv_length=9, local_size=4, attention_mask=None
    )
    config = transformers.LlamaConfig(attention_chunk_size=4)

    def chunks(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key // 4 == query // 4)

    mask = attention.padding_mask(mask_function=chunks, config=config, **common)
    assert mask is not None and mask.shape == (1, 1, 9, 9)
    rows = torch.arange(9)
    assert torch.equal(mask[0, 0], chunks(0, 0, rows[:, None], rows))


def test_no_mask_of_the_size_of_the_sequence_is_built(
    build: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor | None] = []
    forward = attention.attention_forward

    def watch(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        seen.append(mask)
        return forward(module, query, key, value, mask, **options)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a mask was built")

    functions = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(functions, "lmdecode", watch)
    monkeypatch.setattr(attention, "sdpa_mask", refuse)
    for name in MODELS:
        for cache in CACHES:
            if BEFORE_5_3 and cache == "static":
                continue  # transformers asks for whole masks there
            seen.clear()
            generate(build(name, "lmdecode"), cache, 10)
            assert seen and all(mask is None or mask.dim() == 2 for mask in seen)


def test_padding_outside_of_the_window_costs_nothing() -> None:
    mask = torch.arange(20)[None] >= 6
    common: dict[str, Any] = dict(batch_size=1, q_length=1, q_offset=19, local_size=5)
    options = dict(kv_length=5, kv_offset=15, attention_mask=mask)
    assert attention.padding_mask(**common, **options) is None
    got = attention.padding_mask(**common, **{**options, "kv_length": 15, "kv_offset": 5})
    assert torch.equal(got, mask)


def test_a_step_on_a_device_does_not_wait_for_its_mask() -> None:
    """Tensors of the meta device have no numbers that one could ask for, and refuse to be asked."""
    mask = torch.ones(1, 20, dtype=torch.bool, device="meta")
    step: dict[str, Any] = dict(batch_size=1, q_length=1, q_offset=19, kv_length=20)
    assert attention.padding_mask(attention_mask=mask, **step).shape == (1, 20)
    prompt = {**step, "q_length": 20, "q_offset": 0}
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        attention.padding_mask(attention_mask=mask, **prompt)


def test_the_mask_of_a_mask_is_itself() -> None:
    """A static cache has the function called twice."""
    mask = torch.arange(9)[None] >= 4
    common: dict[str, Any] = dict(batch_size=1, q_length=3, q_offset=torch.tensor(6), local_size=5)
    for sizes in (dict(kv_length=20), dict(kv_length=7, kv_offset=2), dict(kv_length=9)):
        once = attention.padding_mask(attention_mask=mask, **common, **sizes)
        assert torch.equal(once, mask)
        assert torch.equal(attention.padding_mask(attention_mask=once, **common, **sizes), once)
    ones = attention.padding_mask(attention_mask=None, **common, kv_length=20)
    assert torch.equal(ones, torch.ones(1, 9, dtype=torch.bool))
    assert torch.equal(attention.padding_mask(attention_mask=ones, **common, kv_length=20), ones)


def test_overlays_are_kept() -> None:
    """What transformers adds to a causal mask makes it one of four dimensions."""

    def overlay(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) | (key == 7)

    common: dict[str, Any] = dict(batch_size=2, q_length=4, kv_length=9, q_offset=5)
    for options in ({"allow_is_causal_skip": False}, {"q_length": 1, "use_vmap": True}):
        given = {**common, "allow_is_causal_skip": False, **options}
        mask = attention.padding_mask(mask_function=overlay, attention_mask=None, **given)
        if BEFORE_5_3:
            positions = torch.arange(given.pop("q_length")) + given.pop("q_offset")
            given["cache_position"] = positions
        assert torch.equal(mask, sdpa_mask(mask_function=overlay, **given))
    assert attention.padding_mask(mask_function=causal_mask_function, **common) is None


@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_and_its_decoder(make_model: Callable[[str], Any], padded: bool) -> None:
    """Attention to both sides, and of one sequence to another."""
    model = make_model("bart")
    inputs = prompts((0, 4, 8) if padded else (0, 0))
    want = model.generate(**inputs, max_new_tokens=30, min_new_tokens=30, num_beams=2)
    model.set_attn_implementation("lmdecode")
    try:
        got = model.generate(**inputs, max_new_tokens=30, min_new_tokens=30, num_beams=2)
    finally:
        model.set_attn_implementation("eager")
    assert torch.equal(got, want)


def test_training_is_refused(build: Callable[[str, str], Any]) -> None:
    model, ids = build("Mistral", "lmdecode"), prompts((0,))["input_ids"]
    with pytest.raises(ValueError, match="query requires a gradient"):
        model(ids)


def test_what_is_not_supported_is_refused() -> None:
    q, k = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)
    call = functools.partial(attention.attention_forward, torch.nn.Module(), q, k, k, None)
    for options, message in (
        ({"dropout": 0.1}, "dropout is 0.1; expected 0"),
        ({"position_bias": torch.zeros(1, 2, 3, 3)}, "position_bias was given; expected none"),
        ({"cache": object()}, "cache was given; expected none"),
        ({"indices": torch.zeros(1, 3, 2).int()}, "indices was given; expected none"),
        ({"block_indices": torch.zeros(1, 3, 2).int()}, "block_indices was given; expected none"),
        ({"sinks": torch.zeros(1, 2, 3, 1)}, "sinks was given; expected none"),
    ):
        with pytest.raises(ValueError, match=f"lmdecode attention: {message}"):
            call(**options)
    assert call()[0].shape == (1, 3, 2, 8)


# What layers pass that has no effect on values, or says again what the mask says.
WITHOUT_EFFECT = {
    "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "max_length_k", "max_length_q",
    "output_attentions", "position_ids",
}  # fmt: skip


def test_all_that_layers_of_transformers_pass_is_known() -> None:
    """By the sources of the release that is installed: another may pass more."""
    passed = set()
    for path in (Path(transformers.__file__).parent / "models").rglob("modeling_*.py"):
        source = path.read_text()
        if "attention_interface(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "attention_interface":
                    passed |= {keyword.arg for keyword in node.keywords}
    taken = inspect.signature(attention.attention_forward).parameters.keys() - {"kwargs"}
    assert {"scaling", "sliding_window", "softcap", "s_aux"} <= passed
    assert BEFORE_5_3 or "indices" in passed
    assert passed - {None} <= taken | WITHOUT_EFFECT | set(attention._UNSUPPORTED)


@pytest.mark.parametrize("is_causal", [True, False])
def test_causal_or_not_is_what_the_module_says(is_causal: bool) -> None:
    module = torch.nn.Module()
    module.is_causal = is_causal
    q, k, v = torch.randn(3, 1, 2, 12, 8).unbind()
    got, _ = attention.attention_forward(module, q, k, v, None)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(got.transpose(1, 2), want)
    other, _ = attention.attention_forward(module, q, k, v, None, is_causal=not is_causal)
    assert not torch.equal(got, other)


def test_a_cache_of_a_smaller_window_is_refused(build: Callable[[str, str], Any]) -> None:
    """It has overwritten what the model's window needs."""
    model = build("Mistral", "lmdecode")
    config = transformers.MistralConfig(**{**LLAMA_LIKE, "sliding_window": WINDOW - 1})
    with pytest.raises(ValueError, match="sliding_window is 5; expected at most 4, the window of"):
        model.generate(**prompts(), max_new_tokens=2, past_key_values=DynamicRingCache(config))


def test_a_ring_of_another_window_is_read_in_order(build: Callable[[str, str], Any]) -> None:
    """Such as that of a layer whose attention has no window."""
    model = build("Mistral", "lmdecode")
    past = DynamicRingCache(model.config)
    with torch.no_grad():
        model(prompts((0,))["input_ids"], past_key_values=past)
        k, v = torch.randn(2, 1, 2, 1, 8).unbind()
        keys, values = past.layers[0].update(k, v)
    assert isinstance(keys, RingStates)
    q, module = torch.randn(1, 4, 1, 8), torch.nn.Module()
    for window in (None, 3, WINDOW):
        got, _ = attention.attention_forward(module, q, keys, values, None, sliding_window=window)
        plain = (keys + 0.0, values + 0.0)
        want, _ = attention.attention_forward(module, q, *plain, None, sliding_window=window)
        torch.testing.assert_close(got, want)
