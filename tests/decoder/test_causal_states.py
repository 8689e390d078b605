"""Layers that keep a state: what is kept, shared, gone back to, and the same bits everywhere."""

import dataclasses
import json
import random
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.models.configs import CausalConfig
from lmdecode.models.mixers import GatedDeltaRule, ShortConvolution
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.readers.transformers.causal_models import causal_model_of
from lmdecode.reference.causal import causal_logits
from tests.decoder.causal_steps import (
    Entry,
    free_blocks,
    generated_logits,
    new_caches,
    packed,
    parts,
    prompt_logits,
    state,
    step,
)
from tests.support.causal_models import VARIANTS, model_of, random_config, random_tokens

STATEFUL = ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next",
            "granitemoehybrid", "falcon_h1")  # fmt: skip
CASES = [(kind, variant) for kind in STATEFUL for variant in VARIANTS[kind]]
cases = pytest.mark.parametrize(("architecture", "variant"), CASES)
FEW = [
    ("lfm2", "convolutions at the ends"),
    ("qwen3_5_text", "delta rule last, biases"),
    ("granitemoehybrid", "experts, multipliers"),
    ("falcon_h1", "norm behind the gate, biases"),
]
few_cases = pytest.mark.parametrize(("architecture", "variant"), FEW)
TEXT = random_tokens(300, 3)


def kept(caches: CausalCaches, sequence: int = 0) -> list[int]:
    """Return behind how many tokens a sequence keeps its state."""
    return [position for position in caches._states[1][sequence].tolist() if position]


@cases
def test_any_chunks_and_any_threads(architecture: str, variant: str) -> None:
    model = packed(architecture, variant)
    expected = prompt_logits(new_caches(model), TEXT[:160])
    for chunk in (1, 2, 5, 31, 32, 33, 64, 97):
        pieces = [chunk] * (160 // chunk) + ([160 % chunk] if 160 % chunk else [])
        assert prompt_logits(new_caches(model), TEXT[:160], *pieces).equal(expected), chunk
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert prompt_logits(new_caches(model, max_rows=50), TEXT[:160]).equal(expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("architecture", "variant"), [("qwen3_5_text", "plain"), ("qwen3_next", "dense")]
)
def test_wide_layers_are_nearer_to_float64_than_those_of_transformers(
    architecture: str, variant: str
) -> None:
    """Those of 5.23, of a prompt at once, in chunks of 64 tokens, and of single tokens."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2}
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    model = model_of(random_config(architecture, variant, **sizes, **kinds))
    config, weights = causal_model_of(model)
    text, past, steps = TEXT[:70], None, []
    exact = causal_logits(config, weights, text, dtype=torch.float64)
    with torch.no_grad():
        theirs = model(text[None]).logits[0]
        for token in text:
            out = model(token[None, None], past_key_values=past, use_cache=True)
            past = out.past_key_values
            steps.append(out.logits[0])
    packed_model = PackedCausalModel(config, weights, "float32")
    for read, other, most in (
        (prompt_logits, theirs, 0.75),
        (generated_logits, torch.cat(steps), 1.0),
    ):
        ours = read(new_caches(packed_model), text)
        assert (ours - exact).norm() < most * (other - exact).norm()


@few_cases
def test_what_is_kept(architecture: str, variant: str) -> None:
    model = packed(architecture, variant)
    caches = new_caches(model, 2, 400)
    step(caches, Entry(0, TEXT[:130], True, 1))
    assert kept(caches) == [130] and kept(caches, 1) == []
    caches = new_caches(model, 2, 400, rollback=3)
    step(caches, Entry(0, TEXT[:130], True, 1))
    assert kept(caches) == [127, 128, 129, 130]
    caches = new_caches(model, 2, 400, checkpoint_interval=16, max_rows=50)
    step(caches, Entry(0, TEXT[:131], True, 1))
    assert kept(caches) == [64, 112, 128, 130, 131]
    for token in TEXT[131:160].split(1):
        step(caches, Entry(0, token, False))
    assert kept(caches) == [64, 128, 130, 131, 144, 160]
    assert [caches.reachable(0, n) for n in (160, 159, 143, 129, 63)] == [160, 144, 131, 128, 0]
    caches.truncate([0], [0])
    assert free_blocks(caches)[-1] == len(caches._states[0])


@few_cases
def test_going_back_to_what_is_kept(architecture: str, variant: str) -> None:
    model = packed(architecture, variant)
    expected = prompt_logits(new_caches(model, 1, 300), TEXT)
    caches = new_caches(model, 1, 300, checkpoint_interval=16)
    prompt_logits(caches, TEXT[:200])
    message = r"goes back to 190 positions of sequence 0; expected one whose state is kept: 0, "
    before = state(caches)
    with pytest.raises(ValueError, match=message):
        caches.truncate([0], [190])
    assert all(map(torch.equal, before, state(caches)))
    for length in kept(caches):
        caches = new_caches(model, 1, 300, checkpoint_interval=16)
        prompt_logits(caches, TEXT[:200])
        caches.truncate([0], [length])
        assert kept(caches)[-1] == length
        assert prompt_logits(caches, TEXT[length:]).equal(expected[length:])


@few_cases
def test_beams_and_forks(architecture: str, variant: str) -> None:
    """States that sequences share, against each one alone."""
    model, choose = packed(architecture, variant), random.Random(5)
    caches = new_caches(model, 4, 300, rollback=2, checkpoint_interval=8, max_rows=16)
    step(caches, Entry(2, TEXT[:70], True, 1))
    one = free_blocks(caches)[-1]
    caches.reorder(torch.full((4,), 2))
    assert free_blocks(caches)[-1] == one
    texts: list[list[int]] = [[] for _ in range(4)]
    for number in range(40):
        tokens = [choose.randrange(3, 90) for _ in range(4)]
        entries = [Entry(i, torch.tensor([token]), False) for i, token in enumerate(tokens)]
        got = torch.cat(step(caches, *entries))
        texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
        parents = [choose.randrange(4) for _ in range(4)]
        if number % 13 == 12:
            for i, text in enumerate(texts):
                own = new_caches(model, 1, 300)
                prompt_logits(own, TEXT[:70])
                assert generated_logits(own, torch.tensor(text))[-1].equal(got[i])
        caches.reorder(torch.tensor(parents))
        texts = [texts[parent] for parent in parents]
    caches.truncate(range(4), [0] * 4)
    assert free_blocks(caches)[-1] == len(caches._states[0])
    assert int(caches._states[3].sum()) == 0


@few_cases
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_state_that_is_read_and_written(architecture: str, variant: str, dtype: str) -> None:
    model = packed(architecture, variant)
    for length in (1, 2, 31, 70):
        first, second = new_caches(model, dtype=dtype), new_caches(model, dtype=dtype)
        prompt_logits(first, TEXT[:length])
        states = first.read(0)
        second.write(0, length, states)
        assert generated_logits(second, TEXT[70:80]).equal(generated_logits(first, TEXT[70:80]))
        third = new_caches(model, dtype=dtype)
        for wrong in (states[:-1], [*states, states[-1]], [*states[:-1], states[0]]):
            with pytest.raises(ValueError, match=r"^CausalCaches.write: "):
                third.write(0, length, wrong)
            assert third.lengths.tolist() == [0]


@few_cases
def test_batch_that_goes_back(architecture: str, variant: str) -> None:
    decoding = lmdecode.Decoding.from_pretrained(model_of(random_config(architecture, variant)))
    batch = decoding.batch(max_requests=2, capacity=300)
    request = batch.add(TEXT[:100])
    first = batch.step()[request]
    for token in TEXT[100:110].tolist():
        last = batch.step({request: token})[request]
    fork = batch.fork(request)
    both = batch.step({fork: 7, request: 7})
    assert both[fork].equal(both[request]) and not both[fork].equal(last)
    with pytest.raises(ValueError, match="keep no state there; expected 100, the longest"):
        batch.truncate(fork, 105)
    batch.truncate(fork, 99)
    batch.extend(fork, TEXT[99:100])
    assert batch.step()[fork].equal(first)


@few_cases
def test_engine_shares_prompts(architecture: str, variant: str) -> None:
    """The same prompt, one that goes on, and one that differs within: tokens of each alone."""
    decoding = lmdecode.Decoding.from_pretrained(model_of(random_config(architecture, variant)))
    prompts = [TEXT[:280], TEXT[:280], TEXT, torch.cat((TEXT[:270], TEXT[:20]))]
    alone = [decoding.generate(p[None], max_new_tokens=8, eos_token_id=None)[0] for p in prompts]
    engine = decoding.engine(max_requests=3, capacity=400)
    cached = []
    with engine:
        for prompt, expected in zip(prompts, alone, strict=True):
            request = engine.submit(prompt.tolist(), max_new_tokens=8, eos_token_id=())
            assert list(request.result().tokens) == expected[len(prompt) :].tolist()
            cached.append(request.stats.cached_tokens)
    assert cached == [0, 279, 280, 256]


@few_cases
def test_saved_and_loaded(architecture: str, variant: str, tmp_path: Any) -> None:
    decoding = lmdecode.Decoding.from_pretrained(
        model_of(random_config(architecture, variant)), "int8"
    )
    decoding.save(tmp_path)
    loaded = lmdecode.Decoding.load(tmp_path)
    assert loaded.decoder.config == decoding.decoder.config
    ids = TEXT[None, :30]
    assert loaded.generate(ids).equal(decoding.generate(ids))


def test_a_convolution_with_a_bias() -> None:
    """transformers computes it of padding, too: of one text alone it has none."""
    config = random_config("lfm2", "convolutions at the ends", conv_bias=True)
    model = model_of(config)
    expected = model(TEXT[None, :50]).logits[0].detach()
    of_config = causal_model_of(model)
    assert of_config[1].layers[0].convolution_bias is not None
    torch.testing.assert_close(causal_logits(*of_config, TEXT[:50]), expected, rtol=0, atol=1e-4)
    decoding = lmdecode.Decoding.from_pretrained(model)
    caches = new_caches(decoding.decoder)
    torch.testing.assert_close(prompt_logits(caches, TEXT[:50]), expected, rtol=0, atol=1e-4)


def test_models_that_are_refused() -> None:
    config = random_config("qwen3_5_text", "plain", layer_types=["linear_attention"] * 4)
    with pytest.raises(ValueError, match="no layer with attention; expected one at least"):
        causal_model_of(model_of(config))
    config = random_config("qwen3_5_text", "plain", hidden_act="gelu")
    with pytest.raises(ValueError, match="activation of linear attention is 'gelu'; expected silu"):
        causal_model_of(model_of(config))


def test_mixers_of_a_config() -> None:
    config, _ = parts("qwen3_5_text", "plain")
    fields = json.loads(json.dumps(dataclasses.asdict(config)))
    assert CausalConfig(**fields) == config
    delta = GatedDeltaRule(2, 4, 8, 8, 4)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"mixers": [delta]}, "mixers has 1 entries; expected 4, or none"),
        ({"mixers": [delta] * 4}, "mixers has no None; expected a layer with attention"),
        ({"mixers": [delta, ShortConvolution(8, 3), None, None]}, "2 different mixers; expected"),
        ({"mixers": [delta, 3, None, None]}, "an entry of type int; expected ShortConvolution"),
        ({"windows": [3, None, None, None]}, r"windows\[0\] and rotary\[0\] are 3 and None; "),
    ]
    for changes, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            dataclasses.replace(config, **changes)
    with pytest.raises(ValueError, match="num_key_heads is 3; expected a divisor"):
        GatedDeltaRule(3, 4, 8, 8, 4)


CAPABILITY_SCRIPT = """
from tests.decoder import test_causal_forward as forward, test_causal_states as tests

for case in tests.FEW:
    forward.test_logits_are_the_references(*case)
    tests.test_any_chunks_and_any_threads(*case)
    tests.test_beams_and_forks(*case)
"""


@pytest.mark.slow
def test_cpu_capability_of_states(run_at_capability: Any) -> None:
    assert run_at_capability(CAPABILITY_SCRIPT) == []
