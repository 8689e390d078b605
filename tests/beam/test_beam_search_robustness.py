"""The engine where something goes wrong: memory, modes of autograd, callbacks, odd arguments."""

from typing import Any

import numpy as np
import pytest
import torch
from small_requests import VOCAB
from small_requests import small_request as _request
from small_requests import step_of as _step

import lmdecode
from lmdecode import BeamRequest, BeamResult, BeamSearch, BeamTrace
from tests.support.beam_searches import TableModel, assert_same_result


def _finish(engine: BeamSearch, model: TableModel) -> dict[Any, BeamResult]:
    while engine.num_rows:
        _step(engine, model)
    return {result.request_id: result for result in engine.pop_finished()}


def _alone(model: TableModel, request: BeamRequest) -> BeamResult:
    engine = BeamSearch()
    engine.insert(request)
    return next(iter(_finish(engine, model).values()))


def test_insert_without_memory_leaves_the_engine_as_it_was() -> None:
    model = TableModel(VOCAB, 1)
    engine = BeamSearch(slots=1, num_beams=1, capacity=4)
    engine.insert(_request(request_id="a"))
    _step(engine, model)
    for huge in ({"max_new_tokens": 10**15}, {"max_new_tokens": 2**62}, {"patience": 1e15}):
        with pytest.raises(RuntimeError):
            engine.insert(_request(request_id="huge", **huge))
    assert engine.running == ("a",) and engine.num_rows == 3
    others = {name: _request(number, num_beams=4) for number, name in enumerate("bcd", 3)}
    for name, request in others.items():
        object.__setattr__(request, "request_id", name)
        engine.insert(request)
    results = _finish(engine, model)
    for name, request in {"a": _request(request_id="a"), **others}.items():
        assert_same_result(results[name], _alone(model, request))


@pytest.mark.parametrize("failing", ["_grown", "_write"])
def test_insert_that_fails_halfway(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    from lmdecode.beam.engine import slots as beam_slots

    model = TableModel(VOCAB, 2)
    engine = BeamSearch(slots=1, num_beams=2)
    engine.insert(_request(num_beams=2, request_id="a"))
    _step(engine, model)
    calls = 0
    owner = beam_slots if failing == "_grown" else beam_slots.BeamSlots
    works = getattr(owner, failing)

    def fails(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("no memory")
        return works(*arguments)

    monkeypatch.setattr(owner, failing, fails)
    wide = _request(num_beams=8, num_beam_groups=2, diversity_penalty=0.5, request_id="wide")
    with pytest.raises(RuntimeError, match="no memory"):
        engine.insert(wide)
    monkeypatch.undo()
    # What was laid out for narrower searches is not used any more.
    _step(engine, model)
    engine.insert(wide)
    slots = [slot for search in engine._running for slot in search.slots]
    assert len(set(slots)) == 3 and not set(slots) & set(engine._store._free)
    assert len({*slots, *engine._store._free}) == len(engine._store.state.lengths)
    results = _finish(engine, model)
    assert_same_result(results["wide"], _alone(model, wide))
    assert_same_result(results["a"], _alone(model, _request(num_beams=2, request_id="a")))


@pytest.mark.parametrize("inside", ["create", "insert", "step"])
def test_engine_goes_in_and_out_of_inference_mode(inside: str) -> None:
    model = TableModel(VOCAB, 3)
    source = torch.rand(64, 5)
    options: dict[str, Any] = {"coverage_penalty": 0.3, "repetition_penalty": 1.2}

    def run(*where: str) -> dict[Any, BeamResult]:
        with torch.inference_mode("create" in where):
            engine = BeamSearch(slots=2, num_beams=1, capacity=3)
        with torch.inference_mode("insert" in where):
            # Grows all that the second request needs.
            engine.insert(
                _request(
                    **options, num_beams=4, max_new_tokens=12, eos_token_id=[0, 1], request_id="a"
                )
            )
        with torch.inference_mode("step" in where):
            logits = model(*engine.input_ids())
            engine.step(logits, attention=source[: engine.num_rows])
        engine.insert(
            _request(3, **options, num_beams=4, max_new_tokens=9, eos_token_id=[0, 1],
                     request_id="b")
        )  # fmt: skip
        while engine.num_rows:
            logits = model(*engine.input_ids())
            engine.step(logits, attention=source[: engine.num_rows, :])
        return {result.request_id: result for result in engine.pop_finished()}

    want, got = run(), run(inside)
    for name in want:
        assert_same_result(got[name], want[name])


def test_state_made_under_inference_mode_can_be_written_to() -> None:
    with torch.inference_mode():
        parts = [*lmdecode.new_beam_state(2, 2, 4), *lmdecode.beam_parameters(2, 2)]
        index = lmdecode.BeamIndirection(rows=2, capacity=4)
        blocks = lmdecode.BlockTable(num_blocks=4, max_rows=2, max_blocks_per_row=2, block_size=2)
    for part in parts:
        part.zero_()
    index.begin([0, 1], prompt_row=0, length=2)
    index.advance()
    index.reorder_(torch.tensor([1, 0]))
    assert index.lengths.tolist() == [3, 3]
    blocks.insert(3, num_beams=2)
    assert blocks.append().copies.tolist() != [] and blocks.lengths.tolist() == [4, 4]


def test_scorer_goes_in_and_out_of_inference_mode() -> None:
    hypotheses = []
    for inference in (False, True):
        scorer = lmdecode.BeamSearchScorer(1, 2, device=torch.device("cpu"))
        arguments = ([[-1.0, -2.0, -3.0, -4.0]], [[3, 4, 5, 6]], [[0, 0, 1, 1]])
        scores, tokens, beams = map(torch.tensor, arguments)
        ids = torch.tensor([[1, 7, 8], [1, 8, 7]])
        with torch.inference_mode(inference):
            scorer.process(ids, scores, tokens, beams, pad_token_id=0, eos_token_id=3)
        more = torch.tensor([[1, 4, 5], [1, 5, 6]])
        scorer.process(more, scores - 1, tokens, beams, pad_token_id=0, eos_token_id=3)
        hypotheses.append([h[1].tolist() for h in scorer._beam_hyps[0].beams])
    assert hypotheses[0] == hypotheses[1] and hypotheses[0]


def test_gradients_are_not_kept() -> None:
    model = TableModel(VOCAB, 4)
    engine = BeamSearch()
    engine.insert(_request(coverage_penalty=0.3))
    while engine.num_rows:
        attention = torch.rand(engine.num_rows, 4, requires_grad=True)
        logits = model(*engine.input_ids()).requires_grad_()
        out = engine.step(logits, attention=attention)
        assert not engine._store.coverage.requires_grad
        assert not out.tokens.requires_grad
    assert not any(part.requires_grad for part in engine._store.state)
    (result,) = engine.pop_finished()
    assert not result.scores.requires_grad and not result.log_probs.requires_grad


def test_output_of_a_step_whose_callback_raises_is_not_lost() -> None:
    model = TableModel(VOCAB, 5)

    def raises(trace: BeamTrace) -> None:
        raise KeyError(trace.request_id)

    engine, twin = BeamSearch(on_step=raises), BeamSearch()
    assert engine.last_output is None
    for each in (engine, twin):
        each.insert(_request(request_id="a"))
    with pytest.raises(KeyError, match="a"):
        _step(engine, model)
    want = _step(twin, model)
    assert twin.last_output is want and engine.last_output is not None
    assert torch.equal(engine.last_output.tokens, want.tokens)
    assert torch.equal(engine.last_output.parents, want.parents)
    engine.on_step = None
    assert_same_result(_finish(engine, model)["a"], _finish(twin, model)["a"])


def test_repr_says_what_is_running() -> None:
    model = TableModel(VOCAB, 6)
    engine = BeamSearch()
    engine.insert(_request(max_new_tokens=1))
    engine.insert(_request())
    assert repr(engine) == "BeamSearch(2 requests running, 2 rows, 0 finished)"
    _step(engine, model)
    assert repr(engine) == "BeamSearch(1 requests running, 3 rows, 1 finished)"


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([1, 2]), np.array([1, 2], dtype=np.uint8), [np.int64(1), np.int32(2)],
        torch.tensor([1, 2]), [torch.tensor(1), torch.tensor(2)], range(1, 3),
    ],
)  # fmt: skip
def test_token_ids_of_any_integers(prompt: Any) -> None:
    request = BeamRequest(
        prompt, max_new_tokens=np.int64(4), num_beams=np.int32(2), eos_token_id=np.int64(7),
        pad_token_id=np.int64(3), suppress_tokens=np.array([4, 5]), logit_bias={np.int64(3): 1},
        length_penalty=np.float32(0.5),
    )  # fmt: skip
    assert request.prompt_ids == (1, 2) and request.eos_token_id == (7,)
    assert request.suppress_tokens == (4, 5) and request.logit_bias == {3: 1.0}
    values = (*request.prompt_ids, request.max_new_tokens, request.num_beams, request.pad_token_id)
    assert all(type(value) is int for value in values)
    plain = BeamRequest(
        [1, 2], max_new_tokens=4, num_beams=2, eos_token_id=7, pad_token_id=3,
        suppress_tokens=[4, 5], logit_bias={3: 1.0}, length_penalty=0.5,
    )  # fmt: skip
    model = TableModel(VOCAB, 7)
    assert_same_result(_alone(model, request), _alone(model, plain))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"request_id": [1]}, TypeError, "request_id is of type list; expected something hashable"),
        ({"prompt_ids": np.zeros((2, 2), int)}, ValueError, r"prompt_ids is an array of shape"),
        ({"prompt_ids": np.zeros(2)}, TypeError, "prompt_ids is of type float; expected an int"),
        ({"prompt_ids": np.zeros(2, bool)}, TypeError, "prompt_ids is of type bool"),
        ({"num_beams": torch.tensor(True)}, TypeError, "num_beams is of type Tensor"),
        ({"num_beams": np.array([2, 3])}, TypeError, "num_beams is of type ndarray"),
        ({"max_new_tokens": 2**63 - 1}, ValueError, "max_new_tokens is .*the prompt counts too"),
        ({"min_new_tokens": 2**63 - 1}, ValueError, "min_new_tokens is .*the prompt counts too"),
        ({"repetition_penalty": 1e39}, ValueError, "a finite number of 32 bits"),
        ({"logit_bias": {1: -1e39}}, ValueError, "a finite number of 32 bits"),
        ({"length_penalty": 10**400}, ValueError, "a finite number of 64 bits"),
        ({"length_penalty": float("nan")}, ValueError, "a finite number of 64 bits"),
    ],
)
def test_odd_requests_are_refused(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=f"BeamRequest: .*{message}"):
        BeamRequest(**{"prompt_ids": [1], "max_new_tokens": 3, **arguments})
