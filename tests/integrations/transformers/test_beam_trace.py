"""The step-by-step comparison with transformers: no difference, and each kind of difference."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from lmdecode.beam.engine import step as step_module
from lmdecode.beam.state import BeamParameters, BeamState
from lmdecode.integrations.transformers import compare_with_transformers

OPTIONS = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "eos_token_id": [2, 5]}


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "bart", "t5"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_no_difference(make_model, prompts, name: str, early_stopping: bool | str) -> None:
    model = make_model(name)
    comparison = compare_with_transformers(
        model, prompts, **OPTIONS, early_stopping=early_stopping, num_return_sequences=2
    )
    assert comparison.difference is None
    assert comparison.num_steps >= 3
    assert comparison.num_candidates == sum(len(trace.candidates) for trace in comparison.traces)
    assert str(comparison) == (
        f"no difference: {comparison.num_steps} steps, {comparison.num_candidates} candidates"
    )


def test_no_difference_with_processors(make_model, padded_prompts) -> None:
    comparison = compare_with_transformers(
        make_model("llama"), padded_prompts["input_ids"],
        attention_mask=padded_prompts["attention_mask"], **OPTIONS, min_new_tokens=4,
        repetition_penalty=1.3, no_repeat_ngram_size=2, suppress_tokens=[7, 8],
        forced_eos_token_id=2, sequence_bias={(9,): 2.0}, length_penalty=2.0,
    )  # fmt: skip
    assert comparison.difference is None


def test_model_is_left_as_it_was(make_model, prompts) -> None:
    model = make_model("gpt2")
    before = set(vars(model))
    compare_with_transformers(model, prompts, **OPTIONS)
    with pytest.raises(ValueError, match="num_beams above 1"):
        compare_with_transformers(model, prompts, max_new_tokens=2, do_sample=False)
    assert set(vars(model)) == before


@pytest.fixture
def replace_op(monkeypatch: pytest.MonkeyPatch):
    """Return a function that has steps call another one, with the op and its arguments by name."""
    op = torch.ops.lmdecode.beam_search_step_
    names = [argument.name for argument in op.default._schema.arguments]

    def replace(step) -> None:
        def beam_search_step_(*args):
            return step(op, **dict(zip(names, args, strict=True)))

        monkeypatch.setattr(
            step_module, "ops", SimpleNamespace(beam_search_step_=beam_search_step_)
        )

    return replace


def _swapped(at: int):
    """Return a step whose first two candidates change places, one time."""
    calls = []

    def step(op, *, trace, **arguments):
        output = op(*arguments.values(), trace)
        calls.append(None)
        if len(calls) == at + 1:
            tokens = trace[2]
            tokens[1, :2] = tokens[1, :2].flip(0)
        return output

    return step


def test_first_difference_among_candidates(make_model, prompts, replace_op) -> None:
    replace_op(_swapped(2))
    comparison = compare_with_transformers(make_model("llama"), prompts, **OPTIONS)
    assert comparison.num_steps == 3 and str(comparison) == comparison.difference
    candidate = next(
        t for t in comparison.traces if (t.step, t.request_id) == (2, 1)
    ).candidates[0]  # fmt: skip
    assert comparison.difference.startswith(
        f"step 2, request 1: candidate 0 is {candidate.token} of beam {candidate.beam}, score "
        f"{candidate.score:.7g}; in transformers "
    )


def test_equal_scores_are_called_so(make_model, prompts, replace_op) -> None:
    replace_op(_swapped(2))
    comparison = compare_with_transformers(make_model("llama"), prompts, **OPTIONS, tolerance=1e3)
    assert comparison.difference.endswith(" (equal scores, within the tolerance)")


def test_first_difference_among_hypotheses(make_model, prompts, replace_op) -> None:
    def longer(op, *, parameters, **arguments):
        penalty = BeamParameters._fields.index("length_penalty")
        parameters = [*parameters]
        parameters[penalty] = parameters[penalty] + 1.0
        logits, state = arguments.pop("logits"), arguments.pop("state")
        return op(logits, state, parameters, *arguments.values())

    replace_op(longer)
    comparison = compare_with_transformers(
        make_model("llama"), prompts, **{**OPTIONS, "eos_token_id": list(range(2, 20))}
    )
    assert "hypothesis 0 is " in comparison.difference


def test_difference_of_the_end(make_model, prompts, replace_op) -> None:
    def ends(op, **arguments):
        tokens, parents, ended = op(*arguments.values())
        state = BeamState(*arguments["state"])
        if int(state.lengths.max()) == prompts.shape[1] + 4:
            state.done.fill_(1)
            ended.fill_(1)
        return tokens, parents, ended

    replace_op(ends)
    comparison = compare_with_transformers(
        make_model("llama"), prompts, num_beams=2, max_new_tokens=6, do_sample=False,
        eos_token_id=60,
    )  # fmt: skip
    assert comparison.difference == "step 4: all is done; transformers goes on"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bad_words_ids": [[3, 4]]}, r"bad_words_ids is \[\[3, 4\]\]; expected none"),
        ({"do_sample": True}, "do_sample is True"),
        ({"logits_processor": [lambda ids, scores: scores]}, "logits_processor is given"),
        ({"sequence_bias": {(3, 4): 1.0}}, "sequence_bias has sequences"),
    ],
)
def test_settings_that_are_not_compared(make_model, prompts, arguments, message: str) -> None:
    with pytest.raises(ValueError, match=f"^compare_with_transformers: {message}"):
        compare_with_transformers(make_model("gpt2"), prompts, **{**OPTIONS, **arguments})
