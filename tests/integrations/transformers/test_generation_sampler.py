"""``generate(custom_generate=sample)`` with penalties, bans and filters that a ``Sampler`` does."""

import functools
import itertools
import math
import random

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from lmdecode.integrations.transformers import TopKTopPLogitsProcessor, sample
from lmdecode.integrations.transformers.sampling import loop
from lmdecode.integrations.transformers.sampling.fusion import CallRows, fuse_sampling
from tests.support.releases import IGNORES_PADDING

assert_identical = functools.partial(torch.testing.assert_close, rtol=0, atol=0)

EDITS = {
    "sequence_bias": {(5,): 1.5, (7, 9): 4.0, (11, 7, 9): -3.25, (9,): 0.7, (3, 4): 2.0},
    "repetition_penalty": 1.7,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[6], [8, 3], [12, 13, 14]],
    "min_length": 13,
    "min_new_tokens": 6,
    "forced_eos_token_id": 2,
    "suppress_tokens": [4, 15],
    "begin_suppress_tokens": [10, 16],
}
FILTERS = {
    "top_h": 0.7, "typical_p": 0.83, "epsilon_cutoff": 0.021, "eta_cutoff": 0.09,
    "temperature": 0.8, "top_k": 12, "top_p": 0.93, "min_p": 0.013,
}  # fmt: skip
PAIRS = [
    *((name,) for name in (*EDITS, *FILTERS)), *itertools.combinations((*EDITS, *FILTERS), 2),
    tuple(EDITS), (*EDITS, *FILTERS),
]  # fmt: skip


class Spy(LogitsProcessor):
    """Keeps what is left of the logits at the end of the list, and what was called."""

    def __call__(self, input_ids, scores):
        return scores


@pytest.fixture
def sampled_by(monkeypatch) -> list[str]:
    """Tell of each step by which function it was done."""
    done: list[str] = []
    for name in ("_sample_by_rules", "_sample_from"):
        function = getattr(loop, name)

        def step(*arguments, name=name, function=function, **options):
            done.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(loop, name, step)
    return done


@pytest.fixture
def processors(monkeypatch) -> list[LogitsProcessorList]:
    """Hold transformers' own list of each step."""
    lists = []

    def fusion(processors, *arguments):
        lists.append(processors)
        return fuse_sampling(processors, *arguments)

    monkeypatch.setattr(loop, "fuse_sampling", fusion)
    return lists


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_scores_are_those_of_the_processors(
    llama, prompts, padded_prompts, processors, names, padded
):
    arguments = {"top_k": 0} | {name: (EDITS | FILTERS)[name] for name in names}
    inputs = padded_prompts if padded else {"input_ids": prompts}
    got = llama.generate(
        **inputs,
        do_sample=True,
        max_new_tokens=10,
        **arguments,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        custom_generate=sample,
        seed=3,
    )
    ids = inputs["input_ids"]
    chain = processors[0]
    assert len(chain) >= len(names)
    for step, (logits, scores) in enumerate(zip(got.logits, got.scores, strict=True)):
        text = got.sequences[:, : ids.shape[1] + step]
        assert_identical(scores, chain(text, logits))


@pytest.mark.parametrize("names", [*((n,) for n in EDITS), tuple(EDITS)], ids="+".join)
def test_greedy_search_is_that_of_transformers(model, prompts, names):
    arguments = {name: EDITS[name] for name in names}
    options = {"do_sample": False, "max_new_tokens": 12, **arguments}
    kept = {"return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(prompts, **options, **kept)
    got = model.generate(prompts, **options, **kept, custom_generate=sample)
    assert torch.equal(got.sequences, expected.sequences)
    running = torch.ones(len(prompts), dtype=torch.bool)
    begin = got.sequences.shape[1] - len(got.scores)
    for i, (mine, theirs) in enumerate(zip(got.scores, expected.scores, strict=True)):
        assert_identical(mine[running], theirs[running])
        running &= got.sequences[:, begin + i] != 2
    assert torch.equal(
        model.generate(prompts, **options, custom_generate=sample), expected.sequences
    )


def test_penalties_need_no_processor(llama, prompts, sampled_by, monkeypatch):
    def fail(*_):
        raise AssertionError("called")

    arguments = {name: EDITS[name] for name in EDITS if name not in ("forced_eos_token_id",)}
    for kind in (
        RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor, NoRepeatNGramLogitsProcessor,
        SuppressTokensLogitsProcessor, MinLengthLogitsProcessor, TopHLogitsWarper,
        TypicalLogitsWarper,
    ):  # fmt: skip
        monkeypatch.setattr(kind, "__call__", fail)
    for do_sample in (True, False):
        filters = FILTERS if do_sample else {}
        llama.generate(
            prompts,
            do_sample=do_sample,
            max_new_tokens=10,
            **arguments,
            **filters,
            custom_generate=sample,
        )
    assert set(sampled_by) == {"_sample_by_rules"}


def test_the_plain_filters_stay_with_their_op(llama, prompts, sampled_by):
    options = {"temperature": 0.8, "top_k": 12, "top_p": 0.93, "min_p": 0.013}
    llama.generate(prompts, do_sample=True, max_new_tokens=4, **options, custom_generate=sample)
    llama.generate(prompts, do_sample=False, max_new_tokens=4, custom_generate=sample)
    assert set(sampled_by) == {"_sample_from"}


@pytest.mark.parametrize("do_sample", [True, False])
def test_tokens_do_not_depend_on_who_does_it(llama, padded_prompts, do_sample, monkeypatch):
    """A ``Sampler`` draws what the op draws from the processors' scores."""
    arguments = {name: EDITS[name] for name in EDITS if name != "no_repeat_ngram_size"}
    if do_sample:
        arguments |= FILTERS

    def run() -> torch.Tensor:
        return llama.generate(
            **padded_prompts,
            do_sample=do_sample,
            max_new_tokens=10,
            **arguments,
            custom_generate=sample,
            seed=[3, 4, 5],
        )

    fused = run()
    monkeypatch.setattr(
        loop, "fuse_sampling", lambda processors, sampled, _: fuse_sampling(processors, sampled)
    )
    assert torch.equal(run(), fused)


def test_rows_do_not_depend_on_padding(llama, padded_prompts):
    options = {
        "do_sample": True, "max_new_tokens": 10, "repetition_penalty": 1.7, "typical_p": 0.9,
        "suppress_tokens": [2], "custom_generate": sample,
    }  # fmt: skip
    together = llama.generate(**padded_prompts, **options, seed=[3, 4, 5])
    for row, mask in enumerate(padded_prompts["attention_mask"].bool()):
        prompt = padded_prompts["input_ids"][row][mask]
        alone = llama.generate(prompt[None], **options, seed=[3 + row])[0]
        assert torch.equal(together[row, len(mask) :], alone[len(prompt) :])


def test_embeddings_have_no_text(llama, prompts):
    embeddings = llama.get_input_embeddings()(prompts)
    options = {"do_sample": False, "max_new_tokens": 10, "no_repeat_ngram_size": 1}
    expected = llama.generate(inputs_embeds=embeddings, **options)
    got = llama.generate(inputs_embeds=embeddings, **options, custom_generate=sample)
    assert torch.equal(got, expected)


def test_wrong_biases_raise_transformers_error(llama, prompts):
    with pytest.raises(ValueError, match="were being biased"):
        llama.generate(
            prompts, sequence_bias={(llama.config.vocab_size,): 1.0}, custom_generate=sample
        )


def test_a_processor_that_changes_is_followed(llama, prompts):
    class Change(LogitsProcessor):
        def __init__(self, other) -> None:
            self.other = other

        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > prompts.shape[1] + 3:
                self.other.penalty = 9.0
            return scores

    def run(**options) -> torch.Tensor:
        penalty = RepetitionPenaltyLogitsProcessor(1.1)
        chain = LogitsProcessorList([Change(penalty), penalty])
        return llama.generate(prompts, max_new_tokens=12, logits_processor=chain, **options)

    assert torch.equal(run(custom_generate=sample), run())


class Biases(dict):
    """Counts how often it is walked through."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


@pytest.mark.parametrize("do_sample", [True, False])
def test_biases_are_read_in_the_first_step_of_a_call(llama, prompts, do_sample):
    processor = SequenceBiasLogitsProcessor({(5,): 1.5, (7, 9): 4.0})
    biases = processor.sequence_bias = Biases(processor.sequence_bias)

    def run(new: int) -> torch.Tensor:
        return llama.generate(
            prompts, do_sample=do_sample, max_new_tokens=new, min_new_tokens=new, seed=2,
            repetition_penalty=1.2, logits_processor=[processor], custom_generate=sample,
        )  # fmt: skip

    run(3)
    walks, biases.walks = biases.walks, 0
    before = run(12)
    assert biases.walks == walks > 0
    biases[(int(before[0, -1]),)] = -50.0
    assert int(run(12)[0, -1]) != int(before[0, -1])  # another call reads them again


R, N, B, T, K, H, Y = (
    RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2),
    SequenceBiasLogitsProcessor({(3,): 1.0}), TemperatureLogitsWarper(0.5), TopKLogitsWarper(7),
    TopHLogitsWarper(0.5), TypicalLogitsWarper(0.9),
)  # fmt: skip
ROWS = CallRows(9, 50, 0)


@pytest.mark.parametrize(
    ("processors", "called", "arguments"),
    [
        ([T, K], None, None),
        ([R, T, K], 0, {"repetition_penalty", "temperature", "top_k"}),
        ([B, R, N, T, H, K, Y], 0, {
            "sequence_bias", "repetition_penalty", "no_repeat_ngram_size", "temperature", "top_h",
            "top_k", "typical_p",
        }),
        ([N, R], 0, {"no_repeat_ngram_size", "repetition_penalty"}),
        ([R, B], 1, {"sequence_bias"}),
        ([K, H], 1, {"top_h"}),
        ([R, Spy(), N], 2, {"no_repeat_ngram_size"}),
        ([T, N], 1, {"no_repeat_ngram_size"}),
        ([R, R], 1, {"repetition_penalty"}),
        ([TypicalLogitsWarper(0.9, min_tokens_to_keep=2), T], None, None),
    ],
)  # fmt: skip
def test_the_longest_suffix_goes_to_the_sampler(processors, called, arguments):
    fusion = fuse_sampling(LogitsProcessorList(processors), True, ROWS)
    if called is None:
        assert fusion.sampler is None
        return
    assert (fusion.sampler.processors or []) == processors[:called]
    assert set(fusion.sampler.arguments) == arguments


def test_greedy_search_gives_no_filter_to_the_sampler():
    assert fuse_sampling(LogitsProcessorList([R, T, K]), False, ROWS).sampler is None
    fusion = fuse_sampling(LogitsProcessorList([T, R, N]), False, ROWS)
    assert fusion.sampler.processors == [T]


@IGNORES_PADDING
def test_padding_that_counts_as_text_is_left_to_the_processors():
    padded = CallRows(9, 50, torch.tensor([0, 2]))
    assert fuse_sampling(LogitsProcessorList([N]), True, padded).sampler is None
    assert fuse_sampling(LogitsProcessorList([R]), True, padded).sampler is None
    ignoring = RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=torch.tensor([0, 2]))
    assert fuse_sampling(LogitsProcessorList([ignoring]), True, padded).sampler is not None


class MyTopK(TopKLogitsWarper):
    """A subclass may do anything."""


class MyList(LogitsProcessorList):
    """A list that may do anything."""


HEAT, TOP, P, M = (
    TemperatureLogitsWarper(0.5), TopKLogitsWarper(7), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1),
)  # fmt: skip
PENALTY = RepetitionPenaltyLogitsProcessor(1.3)
ALL = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1}


def only(*names: str) -> dict[str, float]:
    return {name: ALL[name] for name in names}


@pytest.mark.parametrize(
    ("processors", "called", "stages"),
    [
        ([], 0, {}),
        ([HEAT, TOP, P, M], 0, ALL),
        ([TOP], 0, only("top_k")),
        ([HEAT, M], 0, only("temperature", "min_p")),
        ([PENALTY], 1, {}),
        ([PENALTY, HEAT, TOP, P, M], 1, ALL),
        # Something else stands between the warpers, or after them.
        ([HEAT, TopHLogitsWarper(0.5), TOP, P], 2, only("top_k", "top_p")),
        ([HEAT, TOP, PENALTY], 3, {}),
        ([HEAT, TOP, P, TypicalLogitsWarper(0.9)], 4, {}),
        ([HEAT, TOP, LogitNormalization()], 3, {}),
        # Another order than the op's, or one of them twice.
        ([TOP, HEAT], 1, only("temperature")),
        ([P, TOP, M], 1, only("top_k", "min_p")),
        ([M, P, TOP, HEAT], 3, only("temperature")),
        ([HEAT, HEAT], 1, only("temperature")),
        ([TOP, P, TOP, P], 2, only("top_k", "top_p")),
        # Warpers that the op cannot express.
        ([HEAT, TopKLogitsWarper(7, filter_value=-1e4)], 2, {}),
        ([HEAT, TopPLogitsWarper(0.9, min_tokens_to_keep=2), M], 2, only("min_p")),
        ([HEAT, MinPLogitsWarper(0.1, min_tokens_to_keep=2)], 2, {}),
        ([HEAT, MyTopK(7), P], 2, only("top_p")),
        ([TemperatureLogitsWarper(1e-60), TOP], 1, only("top_k")),
        # The minimum of top-k is part of its k.
        ([TopKLogitsWarper(1, min_tokens_to_keep=7), P], 0, only("top_k", "top_p")),
        # Our own processor counts as its stages.
        ([TopKTopPLogitsProcessor(**ALL)], 0, ALL),
        ([TopKTopPLogitsProcessor(temperature=0.5, top_k=7), P, M], 0, ALL),
        ([TopKTopPLogitsProcessor(temperature=0.5, top_p=0.9), TOP], 1, only("top_k")),
        ([TopKTopPLogitsProcessor(), HEAT], 0, only("temperature")),
    ],
)
def test_the_longest_suffix_in_order_is_fused(processors, called, stages):
    fusion = fuse_sampling(LogitsProcessorList(processors), do_sample=True)
    assert (fusion.processors or []) == processors[:called]
    assert fusion.stages == stages
    assert not fusion.greedy


def test_greedy_search_fuses_nothing():
    fusion = fuse_sampling(LogitsProcessorList([PENALTY, HEAT, TOP]), do_sample=False)
    assert fusion.processors == [PENALTY, HEAT, TOP]
    assert fusion.stages == {}
    assert fusion.greedy


def test_another_kind_of_list_is_called_whole():
    processors = MyList([HEAT, TOP])
    fusion = fuse_sampling(processors, do_sample=True)
    assert fusion.processors is processors
    assert fusion.stages == {}


@pytest.mark.parametrize("seed", range(40))
def test_any_list_keeps_its_distribution(seed):
    """The called part followed by the op leaves the scores that the whole list gives."""
    from lmdecode.sampling.ops import top_k_top_p_sample

    rng = random.Random(seed)
    pool = [
        lambda: TemperatureLogitsWarper(rng.uniform(0.3, 2.0)),
        lambda: TopKLogitsWarper(rng.randint(1, 40), min_tokens_to_keep=rng.choice([1, 3])),
        lambda: TopPLogitsWarper(rng.uniform(0.1, 0.99), min_tokens_to_keep=rng.choice([1, 1, 3])),
        lambda: MinPLogitsWarper(rng.uniform(0.01, 0.5), min_tokens_to_keep=rng.choice([1, 1, 2])),
        lambda: RepetitionPenaltyLogitsProcessor(1.3),
        lambda: TypicalLogitsWarper(0.9),
    ]
    processors = LogitsProcessorList([rng.choice(pool)() for _ in range(rng.randint(0, 6))])
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, 50, generator=generator) * 3
    ids = torch.randint(0, 50, (4, 9), generator=generator)

    fusion = fuse_sampling(processors, do_sample=True)
    called = scores if fusion.processors is None else fusion.processors(ids, scores)
    drawn = top_k_top_p_sample(
        called, **fusion.stages, seed=seed, return_logits=True, dialect="transformers"
    )
    expected = processors(ids, scores)
    assert torch.equal(drawn.kept_logits, expected)
    assert (expected.gather(1, drawn.index[:, None]) > -math.inf).all()
