"""The step-by-step comparison with transformers: no difference, and each kind of difference."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from lmdecode.beam.engine import step as step_module
from lmdecode.beam.state import BeamParameters, BeamState
from lmdecode.integrations.transformers import (
    BeamDynamicCache,
    compare_with_transformers,
    reorder_beams,
)
from lmdecode.integrations.transformers.beam.candidates import (
    Candidates,
    drawn_candidates,
    rank_drawn,
    top_k_candidates,
)
from lmdecode.integrations.transformers.generate_call import SORTS_DRAWN

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


INF = math.inf


@pytest.mark.parametrize("values", [2, 5, 1000])
@pytest.mark.parametrize("count", [1, 4, 11, 60])
def test_the_lowest_index_of_equal_scores_comes_first(values, count):
    """Few different values: the last place is contested by many."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randint(values, (3, 60), generator=generator).float()
        scores[0, ::7] = -INF
        got = top_k_candidates(scores, count, vocab_size=20)
        order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
        found = got.scores > -INF
        assert torch.equal(got.scores, scores.gather(1, order))
        assert torch.equal((got.beams * 20 + got.tokens)[found], order[found])
        assert not got.status.any()


def test_fewer_candidates_than_asked_for():
    got = top_k_candidates(torch.tensor([[1.0, -INF, 3.0, 2.0]]), 6, vocab_size=2)
    assert got.scores.tolist() == [[3.0, 2.0, 1.0, -INF, -INF, -INF]]
    assert got.tokens[0, :3].tolist() == [0, 1, 0]
    assert got.beams[0, :3].tolist() == [1, 1, 0]


def test_status_of_searches_without_candidates():
    scores = torch.tensor([[0.0, 1.0, -INF], [0.0, math.nan, 1.0], [-INF] * 3, [INF, 0.0, 0.0]])
    assert top_k_candidates(scores, 2, vocab_size=3).status.tolist() == [0, 1, 2, 4]
    done = torch.zeros(4, dtype=torch.uint8)
    assert drawn_candidates(scores, 2, 3, done).status.tolist() == [0, 1, 2, 4]
    assert not drawn_candidates(scores, 2, 3, done + 1).status.any()


def test_drawing_is_that_of_multinomial():
    scores = torch.randn(3, 40)
    torch.manual_seed(4)
    expected = torch.multinomial(scores.softmax(-1), 6)
    if SORTS_DRAWN:  # as transformers does from 5.24 on
        expected = expected.gather(1, scores.gather(1, expected).argsort(1, descending=True))
    torch.manual_seed(4)
    got = drawn_candidates(scores, 6, 10, torch.zeros(3, dtype=torch.uint8))
    assert torch.equal(got.beams * 10 + got.tokens, expected)
    assert torch.equal(got.scores, scores.gather(1, expected))


def test_the_order_of_drawn_candidates():
    """Who may close, best first; who goes on, best first; who ends too late; who is none."""
    scores = torch.tensor([[-5.0, -1.0, -2.0, -7.0, -3.0, -INF, -0.5, -4.0]])
    ends = torch.tensor([[True, False, True, False, True, True, True, False]])
    nothing = torch.zeros((1, 8), dtype=torch.int64)
    order = rank_drawn(Candidates(scores, nothing, nothing, nothing[:, 0]), ends, num_beams=3)
    assert order.tolist() == [[2, 0, 1, 7, 3, 6, 4, 5]]


CACHES = (DynamicCache, BeamDynamicCache)


def filled(cache, rows: int, tokens: int = 5):
    """Return the cache with two layers of random keys and values, and these keys."""
    keys = [torch.randn(rows, 2, tokens, 4) for _ in range(2)]
    for number, key in enumerate(keys):
        cache.update(key.clone(), -key, number)
    return cache, keys


@pytest.mark.parametrize("kind", CACHES)
def test_rows_widen_and_leave(kind) -> None:
    cache, keys = filled(kind(), rows=3)
    wider, fewer = torch.tensor([0, 0, 2, 2, 1]), torch.tensor([4, 1])
    reorder_beams(cache, wider)
    reorder_beams(cache, fewer)
    token = torch.randn(2, 2, 1, 4)
    for number, key in enumerate(keys):
        expected = torch.cat((key[wider][fewer], token), dim=2)
        updated_keys, updated_values = cache.update(token, -token, number)
        assert torch.equal(updated_keys, expected)
        assert torch.equal(updated_values, -expected)


@pytest.mark.parametrize("kind", CACHES)
def test_all_rows_leave(kind) -> None:
    cache, _ = filled(kind(), rows=3)
    reorder_beams(cache, torch.tensor([], dtype=torch.int64))
    assert cache.layers[1].keys.shape[0] == 0


def test_cross_attention_follows_the_rows() -> None:
    own, _ = filled(BeamDynamicCache(), rows=2)
    cross, keys = filled(DynamicCache(), rows=2, tokens=7)
    cache = EncoderDecoderCache(own, cross)
    parents = torch.tensor([1, 1, 0])
    reorder_beams(cache, parents)
    assert torch.equal(cache.cross_attention_cache.layers[0].keys, keys[0][parents])


@pytest.mark.parametrize("row", [-1, 3])
def test_rows_that_are_not_there(row: int) -> None:
    cache, keys = filled(BeamDynamicCache(), rows=3)
    with pytest.raises(ValueError, match=rf"beam_idx has {row}; expected 0 to 2"):
        reorder_beams(cache, torch.tensor([0, row]))
    assert torch.equal(cache.layers[0].keys, keys[0])


def test_a_tuple_cannot_change_its_rows() -> None:
    layers = ((torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)),)
    with pytest.raises(ValueError, match="beam_idx has 3 rows; expected 2"):
        reorder_beams(layers, torch.tensor([0, 1, 1]))
