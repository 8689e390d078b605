"""``generate(custom_generate=beam_search)`` against the beam search of transformers 5."""

import functools
import math
import random
import types

import pytest
import torch
import transformers
from beam_parity import EVERYTHING, assert_same, both
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation.stopping_criteria import MaxLengthCriteria
from user_processors import Overwrite

import lmdecode
from lmdecode import BeamRequest, BeamResult, BeamSearch
from lmdecode.integrations.transformers import beam_search, running_model
from lmdecode.integrations.transformers.beam import search
from lmdecode.integrations.transformers.beam.search import SearchResult
from tests.support.beam_searches import (
    TableModel,
    as_transformers_model,
    generate_arguments,
    random_request,
    run_requests,
)
from tests.support.releases import BEFORE_5_3
from tests.support.tiny_models import EOS, PAD, seeded_model

END_TOKENS = [EOS, 7, 11, 13, 17, 19]
EARLY_STOPPING = (False, True, "never")
PENALTIES = (-1.0, 0.0, 1.0, 2.0)


@pytest.fixture
def results(monkeypatch) -> list[SearchResult]:
    """Collect what searches return, with the scores that generate() may not be asked for."""
    seen = []
    finish = search.PlainSearch.finish

    def recorded(self, input_ids):
        seen.append(finish(self, input_ids))
        return seen[-1]

    monkeypatch.setattr(search.PlainSearch, "finish", recorded)
    return seen


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING, ids=str)
def test_tokens_and_scores(beam_model, prompts, early_stopping, results):
    """Without ``output_scores`` the op reads the model's logits; it is the scores' peer here."""
    for number, length_penalty in enumerate(PENALTIES):
        arguments = {
            "num_beams": 3 + number % 2, "num_return_sequences": 1 + number % 3,
            "max_new_tokens": (14, 14, 10, 3)[number], "early_stopping": early_stopping,
            "length_penalty": length_penalty,
            "eos_token_id": (END_TOKENS, EOS, END_TOKENS, None)[number],
            "return_dict_in_generate": True,
        }  # fmt: skip
        scored, got = both(beam_model, prompts, **arguments, output_scores=True)
        assert_same(scored, got)
        expected, got = both(beam_model, prompts, **arguments)
        assert_same(expected, got)
        assert torch.equal(got.sequences, scored.sequences)
        torch.testing.assert_close(
            results[-1].scores, scored.sequences_scores, rtol=1e-5, atol=1e-5
        )


def test_every_output(beam_model, prompts):
    arguments = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 9}
    expected, got = both(beam_model, prompts, eos_token_id=END_TOKENS, **arguments, **EVERYTHING)
    assert_same(expected, got)
    assert len(got.scores) == len(got.logits) == len(expected.scores)


def test_sequences_alone(beam_model, prompts):
    for seed in range(4):
        ids = torch.randint(3, 61, (4, 3), generator=torch.Generator().manual_seed(seed))
        expected, got = both(beam_model, ids, num_beams=4, max_new_tokens=12)
        assert_same(expected, got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bart"])
def test_other_dtypes(make_model, prompts, name, dtype):
    model = make_model(name, dtype=dtype)
    for length_penalty in PENALTIES:
        arguments = {"num_beams": 4, "max_new_tokens": 10, "length_penalty": length_penalty}
        assert_same(*both(model, prompts, **arguments, num_return_sequences=4))


@pytest.mark.parametrize(
    "arguments",
    [
        {"use_cache": False},
        pytest.param(
            {"prefill_chunk_size": 4},
            marks=pytest.mark.skipif(BEFORE_5_3, reason="transformers has no cache for its parts"),
        ),
        {"cache_implementation": "static"},
        {"max_length": 9, "max_new_tokens": None},
        {"guidance_scale": 1.5},
        {"eos_token_id": None, "pad_token_id": None},
        {"pad_token_id": 5, "eos_token_id": END_TOKENS},
        {"pad_token_id": PAD, "eos_token_id": END_TOKENS},
        {"early_stopping": None},
        {"num_beams": 8, "num_return_sequences": 8, "max_new_tokens": 2},
        {"max_time": 0.0},
        {"max_time": 100.0, "eos_token_id": END_TOKENS},
    ],
    ids=lambda arguments: "-".join(arguments),
)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_other_options(make_model, prompts, name, arguments):
    arguments = {"num_beams": 3, "max_new_tokens": 10} | arguments
    assert_same(*both(make_model(name), prompts, **arguments, return_dict_in_generate=True))


@pytest.mark.parametrize("arguments", [{}, EVERYTHING], ids=["fused", "everything"])
def test_left_padding(decoder_model, padded_prompts, arguments):
    arguments = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 10, **arguments}
    assert_same(*both(decoder_model, **padded_prompts, **arguments))


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_static_caches_of_encoder_decoders(make_model, prompts, name):
    arguments = {"num_beams": 3, "max_new_tokens": 9, "cache_implementation": "static"}
    assert_same(*both(make_model(name), prompts, **arguments, return_dict_in_generate=True))


def test_a_compiled_forward_pass(llama, prompts, monkeypatch):
    """A static cache lets generate() compile the model; its tensors stay where they are."""
    compile_config = transformers.CompileConfig(backend="eager", mode=None)
    compile_config._compile_all_devices = True
    arguments = {"num_beams": 3, "max_new_tokens": 8, "cache_implementation": "static"}
    compiled = []
    get_compiled_call = llama.get_compiled_call

    def recorded(config):
        compiled.append(config)
        return get_compiled_call(config)

    monkeypatch.setattr(llama, "get_compiled_call", recorded)
    assert_same(*both(llama, prompts, **arguments, compile_config=compile_config))
    assert compiled == [compile_config]


@pytest.mark.skipif(BEFORE_5_3, reason="transformers keeps the state in no Cache")
def test_a_recurrent_state_follows_the_beams(prompts):
    with torch.random.fork_rng(devices=[]):
        model = seeded_model(
            "MambaForCausalLM", vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4,
            pad_token_id=PAD, eos_token_id=EOS, initializer_range=0.3,
        )  # fmt: skip
    assert_same(*both(model, prompts, num_beams=4, max_new_tokens=10, num_return_sequences=4))


def test_from_embeddings_and_from_a_cache(llama, prompts):
    arguments = {"num_beams": 3, "max_new_tokens": 8}
    embeddings = llama.get_input_embeddings()(prompts)
    assert_same(*both(llama, inputs_embeds=embeddings, **arguments))

    def continued(**kwargs):
        arguments = {"max_new_tokens": 5, "do_sample": False, "num_beams": 3, **kwargs}
        cache = transformers.DynamicCache(config=llama.config)
        llama(prompts[:, :4].repeat_interleave(3, dim=0), past_key_values=cache)
        return llama.generate(prompts, past_key_values=cache, **arguments)

    assert torch.equal(continued(custom_generate=beam_search), continued())


def test_as_a_method_of_a_model(make_model, prompts):
    """A class whose ``_beam_search`` it is needs no argument of generate()."""

    class Model(transformers.LlamaForCausalLM):
        _beam_search = beam_search

    llama = make_model("llama")
    model = Model(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    expected, _ = both(llama, prompts, num_beams=3, max_new_tokens=8)
    assert torch.equal(model.generate(prompts, num_beams=3, max_new_tokens=8), expected)


def test_bound_beforehand(llama, prompts):
    loop = functools.partial(beam_search, synced_gpus=False)
    expected, _ = both(llama, prompts, num_beams=3, max_new_tokens=8)
    got = llama.generate(prompts, num_beams=3, max_new_tokens=8, custom_generate=loop)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING, ids=str)
def test_sampling_draws_what_transformers_draws(beam_model, prompts, early_stopping):
    for seed in range(6):
        arguments = {
            "do_sample": True, "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 10,
            "early_stopping": early_stopping, "length_penalty": PENALTIES[seed % 4],
            "eos_token_id": (EOS, END_TOKENS)[seed % 2], "temperature": 1.5, "top_k": 40,
        }  # fmt: skip
        more = EVERYTHING if seed == 5 else {"return_dict_in_generate": True}
        assert_same(*both(beam_model, prompts, seed=seed, **arguments, **more))


def test_seeds_of_sampling_differ(llama, prompts):
    arguments = {"do_sample": True, "num_beams": 3, "max_new_tokens": 10}
    runs = {str(both(llama, prompts, seed=seed, **arguments)[1].tolist()) for seed in range(4)}
    assert len(runs) > 1


def test_sampling_with_other_criteria(llama, prompts):
    arguments = {
        "do_sample": True, "num_beams": 3, "max_new_tokens": 12, "eos_token_id": END_TOKENS,
        "return_dict_in_generate": True,
    }  # fmt: skip
    for seed in range(4):
        assert_same(
            *both(
                llama, prompts, seed=seed, stopping_criteria=[EndsIn(*range(20, 32))], **arguments
            )
        )


class EndsIn(StoppingCriteria):
    """Stop sequences that end in one of these tokens, and note what was asked."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = torch.tensor(tokens)
        self.seen: list[tuple[torch.Tensor, int | None]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.clone(), None if scores is None else len(scores)))
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.mark.parametrize("output_scores", [False, True])
def test_criteria_see_what_they_see_in_transformers(beam_model, prompts, output_scores):
    criteria = EndsIn(*range(20, 35)), EndsIn(*range(20, 35))
    arguments = {
        "num_beams": 3, "max_new_tokens": 10, "return_dict_in_generate": True,
        "output_scores": output_scores,
    }  # fmt: skip
    expected, _ = both(beam_model, prompts, stopping_criteria=[criteria[0]], **arguments)
    calls = len(criteria[0].seen) // 2
    got = beam_model.generate(
        prompts, stopping_criteria=[criteria[1]], **arguments, custom_generate=beam_search
    )
    assert_same(expected, got)
    assert len(criteria[1].seen) == calls
    for (ids, scores), (expected_ids, expected_scores) in zip(
        criteria[1].seen, criteria[0].seen[:calls], strict=True
    ):
        assert torch.equal(ids, expected_ids)
        assert scores == expected_scores


def test_a_shorter_length_criterion(llama, prompts):
    criteria = [MaxLengthCriteria(prompts.shape[1] + 4)]
    expected, got = both(llama, prompts, num_beams=3, max_new_tokens=10, stopping_criteria=criteria)
    assert_same(expected, got)
    assert got.shape[1] <= prompts.shape[1] + 4


def test_criteria_alone_materialise_nothing(llama, prompts, monkeypatch):
    """The length and end tokens are the op's; no candidate's sequence is put together."""

    def forbidden(*args):
        raise AssertionError("the sequences of candidates were asked for")

    monkeypatch.setattr(search.PlainSearch, "_sequences_of", forbidden)
    llama.generate(prompts, num_beams=3, max_new_tokens=5, custom_generate=beam_search)
    with pytest.raises(AssertionError, match="sequences of candidates"):
        llama.generate(
            prompts, num_beams=3, max_time=9.0, max_new_tokens=5, custom_generate=beam_search
        )


@pytest.mark.parametrize("given", [True, None], ids=["given", "found"])
def test_synced_gpus_runs_on_until_the_others_are_done(llama, prompts, run_synced, given):
    from lmdecode.integrations.transformers.beam import generate_beam_search

    arguments = {"num_beams": 3, "max_new_tokens": 5, "eos_token_id": None}
    got = run_synced(generate_beam_search, given, **arguments, custom_generate=beam_search)
    assert torch.equal(got, both(llama, prompts, **arguments)[0])


def test_only_maps_that_move_rows_reorder_the_cache(llama, prompts, monkeypatch):
    maps, steps = [], []
    reorder = running_model.reorder_beams

    def recorded(cache, parents):
        maps.append(parents.tolist())
        reorder(cache, parents)

    monkeypatch.setattr(running_model, "reorder_beams", recorded)
    hook = llama.register_forward_pre_hook(lambda *_: steps.append(None))
    try:
        llama.generate(
            prompts[:1], num_beams=2, max_new_tokens=30, eos_token_id=None,
            custom_generate=beam_search,
        )  # fmt: skip
    finally:
        hook.remove()
    assert 0 < len(maps) < len(steps)
    assert [0, 1] not in maps


@pytest.mark.parametrize("name", ["bart", "t5", "marian"])
def test_cross_attention_stays_where_it_is(make_model, prompts, name):
    model, seen = make_model(name), set()

    def note(module, inputs, outputs):
        layers = outputs.past_key_values.cross_attention_cache.layers
        seen.add(tuple((layer.keys.data_ptr(), layer.values.data_ptr()) for layer in layers))

    hook = model.register_forward_hook(note)
    try:
        model.generate(prompts, num_beams=4, max_new_tokens=8, custom_generate=beam_search)
    finally:
        hook.remove()
    assert len(seen) == 1


def test_a_models_own_reorder_is_called(make_model, prompts):
    model, parents = make_model("gpt2"), []

    def reorder(self, cache, beam_idx):
        parents.append(beam_idx)
        cache.reorder_cache(beam_idx)
        return cache

    arguments = {"num_beams": 3, "max_new_tokens": 8}
    expected, _ = both(model, prompts, **arguments)
    model._reorder_cache = types.MethodType(reorder, model)
    try:
        got = model.generate(prompts, **arguments, custom_generate=beam_search)
    finally:
        del model._reorder_cache
    assert parents
    assert torch.equal(got, expected)


def test_the_op_reads_the_models_own_logits(make_model, prompts, monkeypatch):
    """Neither a float32 copy nor a softmax is made of them."""
    model, logits, seen = make_model("llama", dtype=torch.bfloat16), [], []
    op = lmdecode.log_softmax_top_k

    def recorded(given, *args, **kwargs):
        seen.append((given.dtype, given.data_ptr()))
        return op(given, *args, **kwargs)

    monkeypatch.setattr(search, "log_softmax_top_k", recorded)
    hook = model.register_forward_hook(lambda _, inputs, out: logits.append(out.logits))
    try:
        model.generate(
            prompts, num_beams=3, max_new_tokens=5, eos_token_id=None, custom_generate=beam_search
        )
    finally:
        hook.remove()
    assert seen == [(torch.bfloat16, x[:, -1].data_ptr()) for x in logits]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 1}, r"^num_beams: expected at least 2 for beam search, got 1$"),
        ({"num_beams": 2, "low_memory": True}, r"^low_memory: expected None, .* got True$"),
        ({"num_beams": 3, "prompt_lookup_num_tokens": 2},
         r"^prompt_lookup_num_tokens: expected None, this is beam search, got 2$"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_options_that_are_refused(llama, prompts, arguments, message):
    with pytest.raises(ValueError, match=message):
        llama.generate(
            prompts, max_new_tokens=5, do_sample=False, **arguments, custom_generate=beam_search
        )


def test_more_results_than_beams_are_refused(llama, prompts):
    config = transformers.GenerationConfig(num_beams=2, max_new_tokens=3, pad_token_id=PAD)
    config.num_return_sequences = 3
    with pytest.raises(ValueError, match="num_return_sequences"):
        llama.generate(prompts, generation_config=config, custom_generate=beam_search)
    config.max_length, config._eos_token_tensor, config._pad_token_tensor = 9, None, None
    with pytest.raises(ValueError, match=r"^num_return_sequences: expected at most num_beams = 2"):
        beam_search(llama, prompts, LogitsProcessorList(), [], config)


def test_a_streamer_is_refused(llama, prompts):
    class Streamer:
        def put(self, value):
            pass

    with pytest.raises(ValueError, match=r"^streamer: expected None for beam search"):
        llama.generate(
            prompts, num_beams=2, max_new_tokens=3, streamer=Streamer(), custom_generate=beam_search
        )


@pytest.mark.parametrize("do_sample", [False, True], ids=["search", "sample"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "NaN in its logits"),
        (-math.inf, "no candidate above -inf"),
        (math.inf, r"a score of \+inf or NaN"),
    ],
)
def test_scores_without_a_token_raise(llama, prompts, do_sample, value, message):
    length = prompts.shape[1] + 2
    with pytest.raises(RuntimeError, match=f"step 2: .*prompt 1 has .*{message}$"):
        llama.generate(
            prompts,
            do_sample=do_sample,
            num_beams=3,
            max_new_tokens=5,
            eos_token_id=None,
            logits_processor=LogitsProcessorList([Overwrite(slice(3, 6), value, length)]),
            custom_generate=beam_search,
        )


@pytest.mark.parametrize(("value", "message"), [(math.nan, "NaN"), (-math.inf, "no candidate")])
def test_the_models_own_logits_without_a_token_raise(llama, prompts, value, message):
    def poison(module, inputs, outputs):
        outputs.logits[7, -1] = value

    hook = llama.register_forward_hook(poison)
    try:
        with pytest.raises(RuntimeError, match=f"step 0: .*prompt 2 has {message}"):
            llama.generate(prompts, num_beams=3, max_new_tokens=5, custom_generate=beam_search)
    finally:
        hook.remove()


@pytest.mark.parametrize("do_sample", [False, True], ids=["search", "sample"])
def test_scores_of_searches_that_are_done_do_not_matter(llama, prompts, do_sample):
    """All beams of prompt 1 end in the second step; what follows is nobody's error."""

    class EndPrompt1(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, EOS] = -math.inf
            scores[3:6] = -20.0
            scores[3:6, EOS] = 0.0
            return scores

    processors = [EndPrompt1(), Overwrite(slice(3, 6), math.nan, prompts.shape[1] + 2)]
    ids = llama.generate(
        prompts,
        do_sample=do_sample,
        num_beams=3,
        max_new_tokens=5,
        early_stopping=True,
        logits_processor=LogitsProcessorList(processors),
        custom_generate=beam_search,
    )
    assert ids[1, prompts.shape[1]] == EOS


def test_a_beam_without_a_token_does_not_end_the_others(llama, prompts):
    """A processor may leave nothing of one beam, as long as others go on."""
    processor = Overwrite(slice(1, 2), -math.inf, prompts.shape[1] + 1)
    arguments = {"num_beams": 3, "max_new_tokens": 6, "eos_token_id": None}
    assert_same(
        *both(llama, prompts[:1], logits_processor=LogitsProcessorList([processor]), **arguments)
    )


def _generate(model, request: BeamRequest, **more):
    """Run stock transformers."""
    return model.generate(**generate_arguments(request), **more)


def _assert_equal(result: BeamResult, expected, case: object) -> None:
    assert torch.equal(result.sequences, expected.sequences), case
    assert torch.equal(result.beam_indices, expected.beam_indices), case
    torch.testing.assert_close(
        result.scores.float(), expected.sequences_scores, rtol=1e-5, atol=1e-5, msg=str(case)
    )


@pytest.mark.parametrize("seed", [*range(8), *(f"processors/{n}" for n in range(8))])
def test_table_models(seed: int | str) -> None:
    """With fewer tokens than candidates, or forced, banned and penalized tokens."""
    choice = random.Random(seed)
    processors = isinstance(seed, str)
    given = {"diversity_penalty": 0.0} if processors else {}
    for _ in range(12):
        vocab = 40 if processors else choice.choice((7, 13, 40))
        table = TableModel(vocab, choice.getrandbits(30))
        request = random_request(
            choice, vocab, processors=processors, dialect="generate",
            num_beams=choice.randint(2, 5), num_beam_groups=1, patience=1.0,
            num_return_sequences=1 if processors else 2, **given,
        )  # fmt: skip
        expected = _generate(as_transformers_model(table), request, use_cache=False)
        result = run_requests(BeamSearch(), table, [(0, request)])[0]
        _assert_equal(result, expected, request)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_models(make_model, name: str, early_stopping: bool | str, length_penalty: float) -> None:
    """In one batch, entering one after the other, without a cache; theirs alone, with one."""
    model = make_model(name)
    choice = random.Random(f"{early_stopping}/{length_penalty}")
    requests = [
        BeamRequest(
            [choice.randrange(3, 61) for _ in range(choice.randint(1, 7))],
            max_new_tokens=choice.randint(3, 12),
            num_beams=num_beams,
            num_return_sequences=2,
            eos_token_id=ends,
            pad_token_id=0 if ends is None else None,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
        )
        for num_beams, ends in ((2, 2), (3, [2, 5, 9]), (4, None), (5, list(range(2, 12))))
    ]

    @torch.no_grad()
    def logits(input_ids, lengths):
        # Causal: what stands behind the end of a row does not reach it.
        mask = (torch.arange(input_ids.shape[1])[None] < lengths[:, None]).long()
        out = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
        return out[torch.arange(len(lengths)), lengths - 1]

    results = run_requests(BeamSearch(), logits, list(enumerate(requests)))
    for number, request in enumerate(requests):
        _assert_equal(results[number], _generate(model, request), request)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_cache_follows_parents(make_model, name: str) -> None:
    """The prompt runs once; its cache widens to the beams and follows ``parents``."""
    from transformers import DynamicCache

    model = make_model(name)
    request = BeamRequest(
        [7, 8, 9], max_new_tokens=10, num_beams=4, num_return_sequences=4, eos_token_id=[2, 5, 11]
    )
    engine, cache = BeamSearch(), DynamicCache()
    engine.insert(request)
    ids = torch.tensor([request.prompt_ids])
    calls = []
    with torch.no_grad():
        while engine.num_rows:
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
            calls.append(tuple(ids.shape))
            out = engine.step(logits)
            ids = out.tokens[:, None]
            cache.reorder_cache(out.parents)
    assert calls == [(1, 3)] + [(4, 1)] * (len(calls) - 1)
    _assert_equal(engine.pop_finished()[0], _generate(model, request), request)
