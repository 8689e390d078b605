"""``generate(do_sample=True, custom_generate=sample)``: noise, distribution, scores, fusion."""

import functools
import itertools
import math

import pytest
import torch
from beam_parity import EVERYTHING
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from user_processors import Forbid

from lmdecode.integrations.transformers import TopKTopPLogitsProcessor, sample
from lmdecode.integrations.transformers.generate_call import CACHE
from lmdecode.integrations.transformers.sampling import loop

PAD, EOS = 0, 2
STAGES = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
assert_identical = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def processed_by_transformers(
    processors: list[LogitsProcessor], sequences: torch.Tensor, logits: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """Return the scores that transformers' processors give along ``sequences``."""
    prompt_length = sequences.shape[1] - len(logits)
    chain = LogitsProcessorList(processors)
    return [chain(sequences[:, : prompt_length + i], x) for i, x in enumerate(logits)]


def test_manual_seed_repeats_a_run(model, prompts):
    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.generate(
            prompts, do_sample=True, max_new_tokens=12, **STAGES, custom_generate=sample
        )

    first = run(1)
    assert torch.equal(run(1), first)
    assert not torch.equal(run(2), first)


def test_rows_do_not_depend_on_the_batch(model, prompts):
    """A row alone draws the tokens that it draws in a batch, also where others end early."""
    seeds = torch.tensor([7, 1 << 40, 12345])

    def run(rows: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return model.generate(
            rows, do_sample=True, max_new_tokens=30, **STAGES, custom_generate=sample, seed=seed
        )

    together = run(prompts, seeds)
    for row in range(3):
        alone = run(prompts[row : row + 1], seeds[row : row + 1])[0]
        assert torch.equal(together[row, : len(alone)], alone)
        assert (together[row, len(alone) :] == PAD).all()


def test_rows_do_not_depend_on_padding(decoder_model, padded_prompts):
    seeds = torch.tensor([3, 4, 5])

    def run(ids: torch.Tensor, **kwargs) -> torch.Tensor:
        return decoder_model.generate(
            ids,
            do_sample=True,
            max_new_tokens=12,
            eos_token_id=None,
            custom_generate=sample,
            **kwargs,
        )

    together = run(
        padded_prompts["input_ids"], attention_mask=padded_prompts["attention_mask"], seed=seeds
    )
    for row, mask in enumerate(padded_prompts["attention_mask"].bool()):
        prompt = padded_prompts["input_ids"][row][mask]
        alone = run(prompt[None], seed=seeds[row : row + 1])[0]
        assert torch.equal(together[row, len(mask) :], alone[len(prompt) :])


def test_noise_goes_on_where_a_cache_is_continued(llama, prompts):
    """Positions count from the start of the sequence, not of the call."""
    # Without a mask, generate() takes generated padding tokens for padding.
    arguments = {"do_sample": True, "eos_token_id": None, "seed": torch.arange(3)}
    arguments["suppress_tokens"] = [PAD]
    whole = llama.generate(prompts, max_new_tokens=12, **arguments, custom_generate=sample)
    first = llama.generate(prompts, max_new_tokens=5, **arguments, custom_generate=sample)
    assert torch.equal(first, whole[:, : first.shape[1]])
    rest = llama.generate(first, max_new_tokens=7, **arguments, custom_generate=sample)
    assert torch.equal(rest, whole)

    embeddings = llama.get_input_embeddings()(prompts)
    generated = llama.generate(
        inputs_embeds=embeddings, max_new_tokens=12, **arguments, custom_generate=sample
    )
    assert torch.equal(generated, whole[:, prompts.shape[1] :])


def test_seed_may_be_an_int(llama, prompts):
    def run(seed: int) -> torch.Tensor:
        return llama.generate(
            prompts[:1].repeat(3, 1),
            do_sample=True,
            max_new_tokens=8,
            custom_generate=sample,
            seed=seed,
        )

    assert torch.equal(run(4), run(4))
    assert len({tuple(row) for row in run(4).tolist()}) == 3


def test_seeds_may_be_a_list(llama, prompts):
    def generate(seed, **options):
        return llama.generate(
            prompts[:2],
            do_sample=True,
            max_new_tokens=6,
            custom_generate=sample,
            seed=seed,
            **options,
        )

    expected = generate(torch.tensor([1, 2]))
    for seed in ([1, 2], (1, 2)):
        assert torch.equal(generate(seed), expected)
    assert torch.equal(generate(torch.tensor(5)), generate(5))
    with pytest.raises(TypeError, match=r"seed\[1\] is of type float"):
        generate([1, 2.5])
    with pytest.raises(ValueError, match=r"^seed: .* each of 2 rows; got \[3\]"):
        generate([1, 2, 3])
    message = r"^seed: .* each of 6 rows, as num_return_sequences = 3 makes 3 rows .*; got \[2\]"
    for seed in ([1, 2], torch.tensor([1, 2])):
        with pytest.raises(ValueError, match=message):
            generate(seed, num_return_sequences=3)


def test_top_k_1_is_greedy(model, prompts):
    greedy = model.generate(prompts, do_sample=False, max_new_tokens=12)
    got = model.generate(
        prompts, do_sample=True, top_k=1, max_new_tokens=12, custom_generate=sample
    )
    assert torch.equal(got, greedy)


@pytest.mark.parametrize(
    "arguments",
    [{}, STAGES, {"temperature": 1.7, "typical_p": 0.8}, {"top_h": 0.6, "top_k": 9}],
    ids=["unfiltered", "fused", "typical_p", "top_h"],
)
def test_first_token_has_the_distribution_of_transformers(make_model, arguments):
    vocab_size, copies, runs = 17, 512, 8
    model = make_model("gpt2", vocab_size=vocab_size)
    prompt = torch.tensor([[5, 9, 3, 12]])
    arguments = {"top_k": 0} | arguments | {"do_sample": True, "max_new_tokens": 1}
    expected = model.generate(prompt, **arguments, output_scores=True, return_dict_in_generate=True)
    probability = expected.scores[0][0].double().softmax(-1)

    torch.manual_seed(0)
    observed = torch.zeros(vocab_size, dtype=torch.float64)
    for _ in range(runs):
        ids = model.generate(
            prompt, **arguments, num_return_sequences=copies, custom_generate=sample
        )
        assert ids.shape == (copies, 5)
        observed += torch.bincount(ids[:, -1], minlength=vocab_size)

    assert (observed[probability == 0] == 0).all()
    kept = probability > 0
    wanted = probability[kept] * copies * runs
    assert wanted.min() > 5  # else chi-square does not apply
    chi_square = ((observed[kept] - wanted) ** 2 / wanted).sum().item()
    freedom = int(kept.sum()) - 1
    assert freedom >= 3
    # Wilson-Hilferty: the cube root is near normal. Four standard deviations.
    z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4


def test_scores_are_those_of_transformers(model, prompts):
    torch.manual_seed(3)
    got = model.generate(
        prompts,
        do_sample=True,
        max_new_tokens=10,
        repetition_penalty=1.4,
        **STAGES,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        custom_generate=sample,
    )
    expected = processed_by_transformers(
        [
            RepetitionPenaltyLogitsProcessor(1.4),
            TemperatureLogitsWarper(STAGES["temperature"]),
            TopKLogitsWarper(STAGES["top_k"]),
            TopPLogitsWarper(STAGES["top_p"]),
            MinPLogitsWarper(STAGES["min_p"]),
        ],
        got.sequences,
        got.logits,
    )
    assert_identical(list(got.scores), expected)


def test_scores_without_any_processor_are_the_logits(llama, prompts):
    arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": 3}
    got = llama.generate(
        prompts,
        **arguments,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        custom_generate=sample,
    )
    assert_identical(got.scores, got.logits)


def test_attentions_and_hidden_states_of_a_sampled_run(model, prompts):
    """Teacher-forced: the model's outputs are those of transformers along the same tokens."""
    torch.manual_seed(4)
    got = model.generate(
        prompts,
        do_sample=True,
        max_new_tokens=6,
        eos_token_id=None,
        **EVERYTHING,
        custom_generate=sample,
    )

    class Follow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            forced = got.sequences[:, input_ids.shape[1]]
            return torch.full_like(scores, -math.inf).scatter(1, forced[:, None], 0.0)

    expected = model.generate(
        prompts,
        do_sample=False,
        max_new_tokens=6,
        eos_token_id=None,
        **EVERYTHING,
        logits_processor=LogitsProcessorList([Follow()]),
    )
    for name in expected:
        if name not in (CACHE, "scores"):
            assert_identical(got[name], expected[name])


def test_user_processor_before_the_op(model, prompts):
    free = model.generate(
        prompts, do_sample=True, max_new_tokens=12, **STAGES, custom_generate=sample, seed=1
    )
    forbidden = sorted(set(free[:, -12:].flatten().tolist()) - {EOS, PAD})[:4]
    assert len(forbidden) == 4
    got = model.generate(
        prompts,
        do_sample=True,
        max_new_tokens=12,
        **STAGES,
        custom_generate=sample,
        seed=1,
        logits_processor=LogitsProcessorList([Forbid(*forbidden)]),
    )
    generated = got if model.config.is_encoder_decoder else got[:, prompts.shape[1] :]
    assert not torch.isin(generated[:, 1:], torch.tensor(forbidden)).any()


def test_processors_are_given_float32_and_the_sequence_so_far(make_model, prompts):
    seen = []

    class Look(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append((input_ids.clone(), scores.dtype))
            return scores

    model = make_model("llama", dtype=torch.bfloat16)
    ids = model.generate(
        prompts,
        do_sample=True,
        max_new_tokens=3,
        eos_token_id=None,
        custom_generate=sample,
        logits_processor=LogitsProcessorList([Look()]),
    )
    assert [dtype for _, dtype in seen] == [torch.float32] * 3
    for step, (input_ids, _) in enumerate(seen):
        assert torch.equal(input_ids, ids[:, : prompts.shape[1] + step])


def test_one_op_call_a_step_replaces_the_warpers(model, prompts, spy):
    model.generate(
        prompts,
        do_sample=True,
        max_new_tokens=7,
        eos_token_id=None,
        **STAGES,
        custom_generate=sample,
    )
    assert len(spy.op_calls) == 7
    assert spy.multinomial_calls == 0
    assert spy.warper_calls == 0
    for _, arguments in spy.op_calls:
        assert {name: arguments[name] for name in STAGES} == STAGES
        assert arguments["dialect"] == "transformers"
        assert not arguments["return_logits"]


def test_softmax_is_not_called(llama, prompts, monkeypatch):
    """With the op replaced by its index, no softmax of torch runs between two forward passes."""
    from lmdecode.sampling.types import SampleOutput

    def op(logits, **arguments):
        zeros = torch.zeros(len(logits), dtype=torch.int64)
        return SampleOutput(logits.argmax(-1), None, None, zeros.int(), zeros.to(torch.uint8))

    def no_softmax(*args, **kwargs):
        raise AssertionError("softmax was called")

    monkeypatch.setattr(loop, "top_k_top_p_sample", op)
    monkeypatch.setattr(torch, "softmax", no_softmax)
    monkeypatch.setattr(torch.nn.functional, "softmax", no_softmax)
    monkeypatch.setattr(torch.Tensor, "softmax", no_softmax)
    llama.generate(prompts, do_sample=True, max_new_tokens=3, **STAGES, custom_generate=sample)


def test_noise_arguments(llama, padded_prompts, spy):
    """Row seeds are drawn once, positions are those of the tokens."""
    llama.generate(
        **padded_prompts,
        do_sample=True,
        max_new_tokens=4,
        eos_token_id=None,
        custom_generate=sample,
    )
    seeds = [arguments["seed"] for _, arguments in spy.op_calls]
    assert all(seed is seeds[0] for seed in seeds)
    assert (
        seeds[0].dtype == torch.int64 and (seeds[0] >= 0).all() and len(set(seeds[0].tolist())) == 3
    )
    for step, (_, arguments) in enumerate(spy.op_calls):
        assert arguments["position"].tolist() == [6 + step, 4 + step, 1 + step]


def test_the_op_reads_the_models_logits_in_place(make_model, prompts, spy):
    model = make_model("llama", dtype=torch.bfloat16)
    storages = []
    hook = model.register_forward_hook(
        lambda module, inputs, outputs: storages.append(outputs.logits.untyped_storage())
    )
    try:
        model.generate(prompts, do_sample=True, max_new_tokens=3, **STAGES, custom_generate=sample)
    finally:
        hook.remove()
    for (logits, _), storage in zip(spy.op_calls, storages, strict=True):
        assert logits.dtype == torch.bfloat16
        assert logits.untyped_storage().data_ptr() == storage.data_ptr()


WARPERS = {
    "temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Closer than this, the floating-point sums of transformers decide.
TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def stable_sort(monkeypatch):
    """Fix the one thing that transformers leaves open: the order of equal values in top-p."""
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))


def chain(scores: torch.Tensor, stages: dict[str, float]) -> torch.Tensor:
    """Apply the warpers in the order of ``generate()`` to float32 scores."""
    warpers = [warper(stages[name]) for name, warper in WARPERS.items() if name in stages]
    return LogitsProcessorList(warpers)(None, scores.float())


def undecided(scores: torch.Tensor, stages: dict[str, float]) -> torch.Tensor:
    """Return [B, V] bool: tokens so close to the bound of top-p or min-p that rounding decides."""
    before_top_p = {name: stages[name] for name in ("temperature", "top_k") if name in stages}
    y = chain(scores, before_top_p)
    close = torch.zeros(y.shape, dtype=torch.bool)
    if "top_p" in stages:
        ascending, order = torch.sort(y, stable=True)
        prob = ascending.double().softmax(-1)
        mass_before = prob.flip(-1).cumsum(-1).flip(-1) - prob
        near = (mass_before - stages["top_p"]).abs() <= TOLERANCE
        close = close.scatter(-1, order, near)
    if "min_p" in stages:
        ratio = (y - y.amax(-1, keepdim=True)).double().exp()
        close |= (ratio - stages["min_p"]).abs() <= TOLERANCE * stages["min_p"]
    return close


def assert_equals_chain(scores: torch.Tensor, stages: dict[str, float]) -> None:
    before = scores.clone()
    got = TopKTopPLogitsProcessor(**stages)(None, scores)
    expected = chain(scores, stages).to(scores.dtype)
    assert got.dtype == scores.dtype and got.shape == scores.shape
    torch.testing.assert_close(scores, before, rtol=0, atol=0, equal_nan=True)
    differs = got != expected
    if differs.any():
        # A token that one of them dropped, never another value of a kept one.
        assert ((got == -math.inf) | (expected == -math.inf))[differs].all()
        assert not (differs & ~undecided(scores, stages)).any()


def random_scores(
    shape: tuple[int, int], dtype: torch.dtype, *, ties: bool, seed: int, scale: float = 4.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(shape, generator=generator) * scale
    if ties:
        scores = (scores * 2).round() / 2
    return scores.to(dtype)


def all_stage_combinations(**values: float):
    for count in range(len(values) + 1):
        for names in itertools.combinations(values, count):
            yield {name: values[name] for name in names}


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 7, 64, 1000])
def test_equals_the_warpers_in_every_combination(vocab, dtype, ties):
    scores = random_scores((5, vocab), dtype, ties=ties, seed=vocab)
    for stages in all_stage_combinations(temperature=0.7, top_k=9, top_p=0.83, min_p=0.04):
        assert_equals_chain(scores, stages)
    for stages in all_stage_combinations(temperature=1.9, top_k=1, top_p=0.15, min_p=0.6):
        assert_equals_chain(scores, stages)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [32000, 128256])
def test_equals_the_warpers_at_real_vocabulary_sizes(vocab, dtype):
    for scale in (1.0, 5.0):
        scores = random_scores((2, vocab), dtype, ties=False, seed=vocab, scale=scale)
        for stages in (
            {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
            {"top_p": 0.9},
            {"top_k": 2000, "top_p": 0.99},
            {"temperature": 1.3, "min_p": 0.1},
        ):
            assert_equals_chain(scores, stages)


@pytest.mark.parametrize(
    "stages",
    [
        {"top_k": 10**9},
        {"top_k": 64},
        {"top_p": 0.0},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"top_p": 0.0, "min_p": 1.0},
        {"temperature": 1e-3, "top_p": 0.5},
        {"temperature": 1e3, "top_p": 0.5},
    ],
    ids=str,
)
def test_equals_the_warpers_at_the_ends_of_the_ranges(stages):
    for ties in (False, True):
        assert_equals_chain(random_scores((4, 64), torch.float32, ties=ties, seed=1), stages)


def test_equals_the_warpers_on_masked_and_equal_scores():
    scores = random_scores((4, 40), torch.float32, ties=True, seed=2)
    scores[0, 5:] = -math.inf
    scores[1] = 3.0
    scores[2, ::2] = scores[2].max()
    scores[3, :39] = -math.inf
    for stages in all_stage_combinations(temperature=0.5, top_k=7, top_p=0.6, min_p=0.3):
        assert_equals_chain(scores, stages)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides(dtype):
    stages = {"temperature": 0.9, "top_k": 12, "top_p": 0.8}
    last_of_sequence = random_scores((3, 4 * 50), dtype, ties=False, seed=3).view(3, 4, 50)[:, -1]
    transposed = random_scores((50, 3), dtype, ties=False, seed=4).t()
    for scores in (last_of_sequence, transposed, last_of_sequence[:0]):
        assert_equals_chain(scores, stages)


def test_float64_scores_are_taken_as_float32():
    scores = random_scores((2, 30), torch.float64, ties=False, seed=6)
    assert_equals_chain(scores, {"top_k": 5, "temperature": 0.6})


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
def test_the_dtype_is_that_of_the_warpers(dtype):
    scores = random_scores((3, 40), dtype, ties=False, seed=9)
    stages = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02}
    warpers = LogitsProcessorList([WARPERS[name](value) for name, value in stages.items()])
    got = TopKTopPLogitsProcessor(**stages)(None, scores)
    assert got.dtype == warpers(None, scores).dtype == dtype
    as_float32 = TopKTopPLogitsProcessor(**stages)(None, scores.float())
    assert torch.equal(got, as_float32.to(dtype))


def test_nothing_left_stays_nothing_left():
    scores = torch.full((2, 8), -math.inf)
    filtered = TopKTopPLogitsProcessor(top_k=3, top_p=0.5)(None, scores)
    assert (filtered == -math.inf).all()


def test_nan_is_not_hidden():
    scores = random_scores((3, 20), torch.float32, ties=False, seed=7)
    scores[1, 13] = math.nan
    filtered = TopKTopPLogitsProcessor(top_k=3)(None, scores)
    assert filtered.softmax(-1)[1].isnan().all()
    assert not filtered.softmax(-1)[[0, 2]].isnan().any()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("top_k", 0, "an int >= 1"),
        ("top_k", -3, "an int >= 1"),
        ("top_k", 2.0, "an int >= 1"),
        ("top_k", True, "an int >= 1"),
        ("top_k", "5", "an int >= 1"),
        ("top_p", -0.1, "a number from 0 to 1"),
        ("top_p", 1.1, "a number from 0 to 1"),
        ("top_p", math.nan, "a number from 0 to 1"),
        ("top_p", "0.9", "a number from 0 to 1"),
        ("min_p", -0.1, "a number from 0 to 1"),
        ("min_p", 2, "a number from 0 to 1"),
        ("temperature", 0.0, "> 0"),
        ("temperature", -1.0, "> 0"),
        ("temperature", math.inf, "finite"),
        ("temperature", math.nan, "> 0"),
        ("temperature", 1e-60, "float32"),
        ("temperature", "1", "> 0"),
    ],
)
def test_bad_arguments(name, value, expected):
    with pytest.raises(ValueError, match=f"^{name}: .*{expected}.*got {value!r}$"):
        TopKTopPLogitsProcessor(**{name: value})


def test_bad_scores():
    with pytest.raises(ValueError):
        TopKTopPLogitsProcessor(top_k=3)(None, torch.randn(10))


def test_arguments_may_be_ints_and_are_shown():
    processor = TopKTopPLogitsProcessor(top_k=4, top_p=1, temperature=2)
    assert repr(processor) == "TopKTopPLogitsProcessor(temperature=2.0, top_k=4, top_p=1.0)"


def test_in_generate(llama, prompts):
    """As a user's processor it gives the scores and the tokens that the warpers give."""

    def generate(**kwargs):
        torch.manual_seed(11)
        return llama.generate(
            prompts,
            do_sample=True,
            max_new_tokens=12,
            output_scores=True,
            return_dict_in_generate=True,
            **kwargs,
        )

    expected = generate(temperature=0.7, top_k=15, top_p=0.9, min_p=0.02)
    processor = TopKTopPLogitsProcessor(temperature=0.7, top_k=15, top_p=0.9, min_p=0.02)
    got = generate(top_k=0, logits_processor=LogitsProcessorList([processor]))
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.scores, expected.scores, strict=True):
        assert torch.equal(ours, theirs)


def test_kept_by_continuous_batching():
    cb = pytest.importorskip("transformers.generation.continuous_batching.cb_logits_processors")

    processor = TopKTopPLogitsProcessor(top_k=3, top_p=0.9)
    processors = cb.ContinuousBatchingLogitsProcessorList(
        LogitsProcessorList([processor]), per_request_processors=True
    )
    assert list(processors.logits_processor) == [processor]
    scores = random_scores((4, 30), torch.float32, ties=False, seed=8)
    batched = processors(torch.zeros(4, dtype=torch.int64), scores, torch.empty(0))
    alone = [processor(None, scores[row : row + 1]) for row in range(4)]
    assert torch.equal(batched, torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_scores_that_cannot_be_minus_infinity_come_back_as_float32(dtype):
    scores = torch.tensor([[1, 5, 3, 4]]).to(dtype)
    got = TopKTopPLogitsProcessor(top_k=2)(None, scores)
    assert got.dtype == torch.float32
    assert got.tolist() == [[-math.inf, 5.0, -math.inf, 4.0]]
