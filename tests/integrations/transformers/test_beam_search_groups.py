"""Group and constrained beam search against transformers 4.38.2, which had them last of its own."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from generate_with_4_38 import ForbidTokens
from transformers import LogitsProcessorList

import lmdecode
from lmdecode.integrations.transformers import HammingDiversityLogitsProcessor, beam_search
from lmdecode.integrations.transformers.beam import group_search
from tests.support.tiny_models import build_model, model_arguments

PAD, EOS, VOCAB = 0, 2, 61
MODELS = ("gpt2", "llama", "bart")


def python_with_4_38() -> Path:
    """Return the interpreter beside which transformers 4.38.2 is installed, or skip."""
    given = os.environ.get("LMDECODE_PYTHON_TRANSFORMERS_4_38")
    # What make test sets up, beside the environment of the tests.
    python = Path(given or f"{sys.prefix}-transformers-4.38/bin/python")
    if not python.exists():
        pytest.skip(
            f"no environment with transformers 4.38.2 at {python}: run make test, or set "
            "LMDECODE_PYTHON_TRANSFORMERS_4_38"
        )
    return python


def _options(choice: random.Random, num_beams: int) -> dict:
    options = {
        "num_beams": num_beams,
        "num_return_sequences": choice.randint(1, num_beams),
        "length_penalty": choice.choice((-1.0, 0.0, 1.0, 2.0)),
        "early_stopping": choice.choice((True, False, "never")),
        "eos_token_id": choice.choice((EOS, [EOS, 7, 11], [EOS, 5, 6, 7, 8])),
        "output_scores": choice.random() < 0.5,
    }
    more = {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 5,
        "suppress_tokens": [5, 6],
        "forbidden": [20, 21, 22, 23],
        "sequence_bias": {(30,): 1.5, (31,): -2.0},
    }
    return options | {name: v for name, v in more.items() if choice.random() < 0.2}


def group_case(choice: random.Random) -> dict:
    groups = choice.choice((2, 3))
    options = _options(choice, groups * choice.choice((1, 2, 3)))
    options |= {
        "num_beam_groups": groups,
        "diversity_penalty": choice.choice((0.3, 1.0, 5.0)),
        "max_new_tokens": choice.choice((1, 4, 12)),
    }
    if options["max_new_tokens"] < 5:
        options.pop("min_new_tokens", None)
    if choice.random() < 0.2:
        options["forced_eos_token_id"] = EOS
    return options


def constrained_case(choice: random.Random) -> dict:
    tokens = range(14, VOCAB)
    words = [choice.sample(tokens, choice.randint(1, 3)) for _ in range(choice.randint(1, 2))]
    if choice.random() < 0.4:
        words.append([choice.sample(tokens, 2), choice.sample(tokens, 3)])
    options = _options(choice, choice.choice((2, 4, 6)))
    # transformers fails over results without beam indices, which are among several.
    options["output_scores"] &= options["num_return_sequences"] == 1
    return options | {"force_words_ids": words, "max_new_tokens": choice.choice((8, 12))}


CASES = {"groups": group_case, "constrained": constrained_case}


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, list[dict]]:
    """Return random cases of each kind and model, each with the result of transformers 4.38.2."""

    python = python_with_4_38()
    found: dict[str, list[dict]] = {}
    for (kind, make), name in itertools.product(CASES.items(), MODELS):
        for number in range(16):
            choice = random.Random(f"{kind} {name} {number}")
            generator = torch.Generator().manual_seed(number)
            arguments = make(choice)
            batch = choice.randint(1, 3)
            if kind == "constrained" and arguments["output_scores"]:
                batch = 1
            ids = torch.randint(14, VOCAB, (batch, choice.choice((2, 5))), generator=generator)
            mask = torch.ones_like(ids)
            if name != "bart" and choice.random() < 0.3:
                ids[0, 0], mask[0, 0] = PAD, 0
                arguments.pop("repetition_penalty", None)  # which counts the padding there
            found.setdefault(f"{kind} {name}", []).append(
                {
                    "name": name,
                    "model": model_arguments(name),
                    "state": build_model(name, VOCAB, torch.float32).state_dict(),
                    "inputs": {"input_ids": ids, "attention_mask": mask},
                    "arguments": arguments,
                }
            )
    everything = [case for group in found.values() for case in group]
    folder = tmp_path_factory.mktemp("transformers_4_38")
    torch.save(everything, folder / "in.pt")
    script = Path(__file__).with_name("generate_with_4_38.py")
    done = subprocess.run(
        [python, script, folder / "in.pt", folder / "out.pt"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for case, result in zip(everything, torch.load(folder / "out.pt"), strict=True):
        case["expected"] = result
    return found


def generated(model, inputs, arguments, **kwargs):
    arguments = dict(arguments)
    forbidden = arguments.pop("forbidden", None)
    if forbidden:
        arguments["logits_processor"] = LogitsProcessorList([ForbidTokens(forbidden)])
    return model.generate(
        **inputs,
        **arguments,
        **kwargs,
        do_sample=False,
        return_dict_in_generate=True,
        custom_generate=beam_search,
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.slow
def test_as_transformers_4_38(cases, make_model, kind, name):
    for case in cases[f"{kind} {name}"]:
        expected = case["expected"]
        got = generated(make_model(name), case["inputs"], case["arguments"])
        assert torch.equal(got.sequences, expected["sequences"]), case["arguments"]
        if case["arguments"]["output_scores"]:
            assert len(got.scores) == len(expected["scores"])
            torch.testing.assert_close(
                got.sequences_scores, expected["sequences_scores"], rtol=1e-5, atol=1e-5
            )


GROUPS = {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 1.0, "max_new_tokens": 9}


@pytest.mark.parametrize("name", MODELS)
def test_fused_and_whole_rows_agree(make_model, prompts, name):
    """With ``output_scores`` the processors are called, without it the op does what they do."""
    arguments = GROUPS | {
        "num_return_sequences": 6,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 4,
        "eos_token_id": [EOS, 7, 9],
    }
    inputs = {"input_ids": prompts}
    whole = generated(make_model(name), inputs, arguments, output_scores=True)
    fused = generated(make_model(name), inputs, arguments)
    assert torch.equal(fused.sequences, whole.sequences)
    assert torch.equal(fused.beam_indices, whole.beam_indices)
    assert fused.scores is None and fused.sequences_scores is None


def test_groups_differ(llama, prompts):
    def first_tokens(penalty: float) -> list[int]:
        out = generated(
            llama,
            {"input_ids": prompts[:1]},
            GROUPS | {"diversity_penalty": penalty, "num_beams": 3, "num_return_sequences": 3},
        )
        return out.sequences[:, prompts.shape[1]].tolist()

    assert len(set(first_tokens(1e-6))) == 1
    assert len(set(first_tokens(50.0))) == 3


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("kind", CASES)
def test_beam_indices_lead_to_the_scores(make_model, prompts, kind, name):
    """Along ``beam_indices`` the log-probabilities add up to the scores of the sequences."""
    model = make_model(name)
    arguments = GROUPS if kind == "groups" else {"num_beams": 4, "force_words_ids": [[30, 31]]}
    arguments = arguments | {"max_new_tokens": 9, "num_return_sequences": 2, "output_logits": True}
    out = generated(model, {"input_ids": prompts}, arguments, output_scores=True)
    transitions = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    lengths = (out.beam_indices >= 0).sum(dim=1)
    torch.testing.assert_close(
        transitions.sum(dim=1) / lengths, out.sequences_scores, rtol=1e-5, atol=1e-5
    )
    assert all(logits.dtype == torch.float32 for logits in out.logits)


def test_prefixes_and_padding_with_groups(llama, padded_prompts):
    """Processors that know of rows get those of the group."""
    allowed = list(range(10, 40))
    seen = set()

    def allowed_tokens(batch_id, ids):
        seen.add(batch_id)
        return allowed

    arguments = GROUPS | {"repetition_penalty": 1.2, "num_return_sequences": 6}
    length = padded_prompts["input_ids"].shape[1]
    out = generated(llama, padded_prompts, arguments, prefix_allowed_tokens_fn=allowed_tokens)
    assert seen == {0, 1, 2}
    assert set(out.sequences[:, length:].unique().tolist()) <= {PAD, EOS, *allowed}
    padded = generated(llama, padded_prompts, arguments)
    row = {"input_ids": padded_prompts["input_ids"][1:2, 2:]}
    alone = generated(llama, row, arguments)
    new = alone.sequences.shape[1] - row["input_ids"].shape[1]
    assert torch.equal(padded.sequences[6:12, length : length + new], alone.sequences[:, -new:])


def test_stopping_criteria_of_groups(llama, prompts):
    out = generated(llama, {"input_ids": prompts}, GROUPS | {"max_time": 0.0})
    assert out.sequences.shape[1] <= prompts.shape[1] + 2


def test_the_penalty_stands_once(llama, prompts):
    """A list that has a diversity processor already gets no second one."""
    given = LogitsProcessorList([HammingDiversityLogitsProcessor(1.0, 6, 3)])
    out = generated(llama, {"input_ids": prompts}, GROUPS)
    again = generated(llama, {"input_ids": prompts}, GROUPS, logits_processor=given)
    assert torch.equal(out.sequences, again.sequences)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 5}, r"^num_beam_groups: expected a divisor of num_beams = 5, got 3$"),
        ({"diversity_penalty": 0.0}, r"^diversity_penalty: expected a number > 0, .*, got 0.0$"),
        ({"num_beam_groups": 1}, r"^num_beam_groups: expected at least 2 with a diversity_penalty"),
        ({"do_sample": True}, r"^do_sample: expected False for groups of beams, got True$"),
        ({"guidance_scale": 1.5}, r"^guidance_scale: expected None, .*, got 1.5$"),
        ({"force_words_ids": [[3]]}, r"^num_beam_groups: expected 1 with constraints, got 3$"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_do_not_fit(llama, prompts, arguments, message):
    arguments = {"do_sample": False} | GROUPS | arguments
    with pytest.raises(ValueError, match=message):
        llama.generate(prompts, **arguments, custom_generate=beam_search)


def test_logits_without_a_token_raise(llama, prompts):
    def poison(module, inputs, outputs):
        outputs.logits[7, -1] = float("nan")

    hook = llama.register_forward_hook(poison)
    try:
        with pytest.raises(RuntimeError, match=r"step 0: .*prompt 1 has NaN in its logits$"):
            generated(llama, {"input_ids": prompts}, GROUPS)
        with pytest.raises(RuntimeError, match=r"step 0: .*prompt 1 has NaN in its logits$"):
            arguments = {"num_beams": 6, "force_words_ids": [[3]]}
            generated(llama, {"input_ids": prompts}, arguments)
    finally:
        hook.remove()


def test_hamming_diversity_counts_what_earlier_groups_chose():
    processor = HammingDiversityLogitsProcessor(0.5, num_beams=6, num_beam_groups=3)
    scores = torch.randn(4, 10)
    before = scores.clone()
    tokens = torch.tensor([1, 1, 4, 9, 0, 0, 2, 3, 2, 2, 0, 0])
    got = processor(None, scores, current_tokens=tokens, beam_group_idx=2)
    expected = before.clone()
    for row, chosen in ((0, (1, 1, 4, 9)), (1, (1, 1, 4, 9)), (2, (2, 3, 2, 2)), (3, (2, 3, 2, 2))):
        for token in chosen:
            expected[row, token] -= 0.5
    torch.testing.assert_close(got, expected)
    assert torch.equal(scores, before)
    assert torch.equal(processor(None, scores, tokens, 0), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_hamming_diversity_keeps_the_dtype_of_the_scores(dtype):
    processor = HammingDiversityLogitsProcessor(0.5, num_beams=4, num_beam_groups=2)
    got = processor(None, torch.zeros(2, 6, dtype=dtype), torch.tensor([1, 1, 4, 4]), 1)
    assert got.dtype == dtype
    assert got[0].tolist() == [0, -1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 4, 2), "^diversity_penalty: expected a number > 0, got 0.0$"),
        (("1", 4, 2), "^diversity_penalty: expected a number > 0, got '1'$"),
        ((1.0, 1, 2), "^num_beams: expected an int >= 2, got 1$"),
        ((1.0, 4, 1), "^num_beam_groups: expected an int >= 2 .* got 1$"),
        ((1.0, 4, 3), "^num_beam_groups: expected an int >= 2 that divides num_beams = 4, got 3$"),
    ],
)
def test_hamming_diversity_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        HammingDiversityLogitsProcessor(*arguments)


def test_every_result_holds_the_words(make_model, prompts):
    model = make_model("gpt2")
    out = generated(
        model,
        {"input_ids": prompts},
        {"num_beams": 6, "max_new_tokens": 20, "force_words_ids": [[30, 31], [[40, 41], [50, 51]]]},
    )
    for row in out.sequences.tolist():
        pairs = set(itertools.pairwise(row))
        assert (30, 31) in pairs
        assert pairs & {(40, 41), (50, 51)}


def test_constraints_as_objects_and_in_the_configuration(llama, prompts):
    inputs, arguments = {"input_ids": prompts}, {"num_beams": 4, "max_new_tokens": 8}
    by_ids = generated(llama, inputs, arguments | {"force_words_ids": [[30, 31]]})
    constraint = lmdecode.PhrasalConstraint([30, 31])
    by_object = generated(llama, inputs, arguments | {"constraints": [constraint]})
    config = transformers.GenerationConfig(
        **arguments, force_words_ids=[[30, 31]], pad_token_id=PAD, eos_token_id=EOS
    )
    by_config = llama.generate(prompts, generation_config=config, custom_generate=beam_search)
    assert torch.equal(by_object.sequences, by_ids.sequences)
    assert torch.equal(by_config, by_ids.sequences)


@pytest.mark.parametrize("words", [[], [[]], [[-1]], [[[3], []]], [3], "abc", [[3, "a"]], [[[]]]])
def test_words_that_are_none(llama, prompts, words):
    with pytest.raises(ValueError, match=r"^force_words_ids: expected a list whose entries"):
        generated(llama, {"input_ids": prompts}, {"num_beams": 2, "force_words_ids": words})


@pytest.mark.parametrize("constraints", [[[3]], [None], lmdecode.PhrasalConstraint([3]), "abc"])
def test_constraints_that_are_none(llama, prompts, constraints):
    with pytest.raises(TypeError, match=r"^constraints: expected a list of PhrasalConstraint"):
        generated(llama, {"input_ids": prompts}, {"num_beams": 2, "constraints": constraints})


@pytest.mark.parametrize("words", [[[VOCAB]], [[3, VOCAB]], [[[3], [VOCAB + 7]]]])
def test_words_that_the_model_does_not_know(llama, prompts, words):
    with pytest.raises(ValueError, match=rf"token ids of the vocabulary, 0 to {VOCAB - 1}, got"):
        generated(llama, {"input_ids": prompts}, {"num_beams": 2, "force_words_ids": words})


def test_every_constrained_result_has_its_beam_indices(llama, prompts):
    """Also one that does not fulfil the constraints: 4.38.2 leaves out all, then."""
    arguments = {
        "num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 6,
        "force_words_ids": [[30, 31, 32, 33]],
    }  # fmt: skip
    out = generated(llama, {"input_ids": prompts}, arguments | {"output_scores": True})
    steps = llama.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    lengths = (out.beam_indices >= 0).sum(dim=1)
    torch.testing.assert_close(steps.sum(dim=1) / lengths, out.sequences_scores, atol=1e-5, rtol=0)


def test_constraints_are_not_sampled(llama, prompts):
    with pytest.raises(ValueError, match=r"^do_sample: expected False with constraints"):
        llama.generate(
            prompts, num_beams=2, do_sample=True, force_words_ids=[[3]], custom_generate=beam_search
        )


def test_group_search_reads_the_models_own_logits(llama, prompts, monkeypatch):
    calls = []
    op = lmdecode.log_softmax_top_k

    def recorded(logits, *args, **kwargs):
        calls.append(logits.data_ptr())
        return op(logits, *args, **kwargs)

    monkeypatch.setattr(group_search, "log_softmax_top_k", recorded)
    logits = []
    hook = llama.register_forward_hook(lambda _, inputs, out: logits.append(out.logits))
    try:
        generated(llama, {"input_ids": prompts}, GROUPS | {"eos_token_id": None})
    finally:
        hook.remove()
    assert calls == [x[:, -1].data_ptr() for x in logits for _ in range(3)]
