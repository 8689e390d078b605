"""The engine where something goes wrong: memory, modes of autograd, callbacks, odd arguments."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from small_requests import VOCAB
from small_requests import small_request as _request
from small_requests import step_of as _step
from transformers import GPT2LMHeadModel
from transformers.utils import logging

import lmdecode
from lmdecode import (
    BeamCandidates,
    BeamRequest,
    BeamResult,
    BeamSearch,
    BeamTrace,
    beam_parameters,
    log_softmax_top_k,
    new_beam_state,
)
from lmdecode.reference import beam_rules as reference
from tests.support.beam_searches import TableModel, assert_same_result, run_requests
from tests.support.op_contract import WrongCall, assert_refused, by_argument, wrong_calls
from tests.support.random_tensors import randint, randn
from tests.support.tiny_models import seeded_model


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


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_beams": 0}, ValueError, "num_beams is 0; expected an int of 64 bits, at least 1"),
        ({"num_beams": 2.0}, TypeError, "num_beams is of type float; expected an int"),
        ({"num_beams": True}, TypeError, "num_beams is of type bool"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens is 0"),
        ({"num_return_sequences": 4}, ValueError, "num_return_sequences is 4; expected at most"),
        ({"num_beam_groups": 2}, ValueError, "num_beam_groups is 2; expected a divisor"),
        ({"diversity_penalty": 1.0}, ValueError, "diversity_penalty is 1.0; expected 0 where"),
        ({"length_penalty": math.nan}, ValueError, "length_penalty is nan; expected a finite"),
        ({"length_penalty": "1"}, TypeError, "length_penalty is of type str; expected a number"),
        ({"early_stopping": "always"}, ValueError, "early_stopping is 'always'; expected True"),
        ({"early_stopping": 1}, ValueError, "early_stopping is 1; expected True, False"),
        ({"eos_token_id": -1}, ValueError, "eos_token_id is -1"),
        ({"eos_token_id": [1.5]}, TypeError, "eos_token_id is of type float; expected an int"),
        ({"pad_token_id": -1}, ValueError, "pad_token_id is -1"),
        ({"min_new_tokens": -1}, ValueError, "min_new_tokens is -1"),
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty is 0.0; expected a number"),
        ({"patience": 0.0}, ValueError, "patience is 0.0; expected a number above 0"),
        ({"patience": 0.3, "num_return_sequences": 3}, ValueError, "patience is 0.3; expected m"),
        ({"logit_bias": [1]}, TypeError, "logit_bias is of type list; expected a mapping"),
        ({"logit_bias": {1: math.inf}}, ValueError, "a value of logit_bias is inf"),
        ({"dialect": "beam"}, ValueError, "dialect is 'beam'; expected one of generate, scorer"),
        ({"dialect": "fairseq", "early_stopping": True}, ValueError, "early_stopping is True"),
        ({"prompt_ids": []}, ValueError, "prompt_ids is empty; expected at least one token"),
        ({"prompt_ids": "ab"}, TypeError, "prompt_ids is of type str; expected token ids"),
        ({"prompt_ids": torch.zeros(1, 2).long()}, ValueError, r"tensor of shape \[1, 2\]"),
        ({"prompt_ids": torch.zeros(2)}, ValueError, "prompt_ids is a float32 tensor"),
    ],
)  # fmt: skip
def test_wrong_requests(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^BeamRequest: .*{message}"):
        BeamRequest(**{"prompt_ids": [1], "max_new_tokens": 2, "num_beams": 3, **arguments})


def test_prompts_of_any_kind() -> None:
    for prompt in ([3, 4], (3, 4), torch.tensor([3, 4]), torch.tensor([3, 4], dtype=torch.int32)):
        assert BeamRequest(prompt, max_new_tokens=1).prompt_ids == (3, 4)


def test_wrong_calls_change_nothing() -> None:
    model = TableModel(VOCAB, 15)
    expected = run_requests(BeamSearch(), model, [(0, _request())])[0]
    engine = BeamSearch()
    engine.insert(_request())
    _step(engine, model)
    good = model(*engine.input_ids())
    calls = [
        ({"logits": good[:2]}, ValueError, r"logits has shape \[2, 13\]; expected \[3, 13\]: one"),
        ({"logits": good[:, :5]}, ValueError, r"logits has shape \[3, 5\]; expected \[3, 13\]"),
        ({"logits": good[0]}, ValueError, r"logits has shape \[13\]; expected \[3, 13\]"),
        ({"logits": good.double()}, ValueError, "logits has dtype float64; expected float32 or"),
        ({"logits": good.tolist()}, TypeError, "logits is of type list; expected a tensor"),
        ({"token_bitmask": torch.zeros(3, 2, dtype=torch.int32)}, ValueError,
         r"token_bitmask has shape \[3, 2\]; expected \[3, 1\]"),
        ({"token_bitmask": torch.zeros(3, 1)}, ValueError, "token_bitmask has dtype float32"),
    ]  # fmt: skip
    for arguments, error, message in calls:
        with pytest.raises(error, match=message):
            engine.step(**{"logits": good, **arguments})
    while engine.num_rows:
        _step(engine, model)
    assert_same_result(engine.pop_finished()[0], expected)
    with pytest.raises(TypeError, match="request is of type dict; expected a BeamRequest"):
        engine.insert({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="BeamSearch: slots is 0; expected at least 1"):
        BeamSearch(slots=0)
    with pytest.raises(TypeError, match="BeamSearch: vocab_size is of type str"):
        BeamSearch("13")  # type: ignore[arg-type]


INF, NAN = float("inf"), float("nan")

TOKENS, NUMBERS = randint(5, 6, 4), torch.ones(3)
# The calls have 3 requests of 2 beams, a vocabulary of 40 tokens and sequences of 4 columns. They
# are what tests/test_op_contracts.py does not make from right calls.
WRONG_TYPES: dict[str, list[Any]] = {"repetition_penalty": [[1.0]]}
WRONG_VALUES: dict[str, list[Any]] = {
    "sequences": [
        {"sequences": None, "repetition_penalty": 1.5},
        {"sequences": None, "no_repeat_ngram_size": NUMBERS.long()},
    ],
    "lengths": [{"sequences": None, "end_tokens": TOKENS[0], "min_lengths": 4}],
    "repetition_penalty": [0.0, -1.0, 1e39],
    "no_repeat_ngram_size": [-1],
    "min_lengths": [{"end_tokens": TOKENS[0]}, {"end_tokens": TOKENS[0], "min_lengths": -1}],
    "end_tokens": [{"min_lengths": 3}, {"end_tokens": TOKENS, "min_lengths": 3}],
    "suppressed_tokens": [torch.tensor(3)],
    "forced_tokens": [TOKENS[0], TOKENS[:3, :1]],
    "diversity_penalty": [
        {"diversity_tokens": TOKENS[:3]},
        {"diversity_tokens": TOKENS[:3], "diversity_penalty": INF},
    ],
    "diversity_tokens": [{"diversity_penalty": 0.5}],
    "bias": [torch.zeros(39), torch.zeros(4, 40), torch.tensor(1.0)],
    "token_bitmask": [TOKENS[:3, :1].int()],
}  # fmt: skip


def call(device: torch.device, **changes: Any) -> BeamCandidates:
    arguments = {"sequences": TOKENS, **changes}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            arguments[name] = value.to(device)
    x = randn(6, 40).to(device)
    return log_softmax_top_k(x, x[:, 0].clone(), 4, num_beams=2, **arguments)


@wrong_calls(by_argument(TypeError, WRONG_TYPES), by_argument(ValueError, WRONG_VALUES))
def test_error_names_the_argument(wrong: WrongCall, device: torch.device) -> None:
    assert_refused(wrong, lambda: call(device, **wrong[1]))


@pytest.mark.parametrize("lengths", [[0, 5, 4], [-1, 0, 0]])
def test_wrong_lengths(lengths: list[int]) -> None:
    """What the CPU alone can see."""
    with pytest.raises(ValueError, match="lengths"):
        call(torch.device("cpu"), lengths=torch.tensor(lengths))


WORDS = 50


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    logging.set_verbosity_error()
    return seeded_model(
        "GPT2LMHeadModel", vocab_size=WORDS, n_layer=1, n_head=2, n_embd=16, n_positions=64,
        bos_token_id=0, eos_token_id=1, attn_implementation="eager",
    )  # fmt: skip


def searched(
    model: GPT2LMHeadModel, ids: torch.Tensor, num_beams: int, new: int, options: dict[str, Any],
    implementation: Any, best: Any,
) -> tuple[Any, int]:  # fmt: skip
    """Drive a search by beam_step; return the final result and the steps."""
    batch, prompt = ids.shape
    ends = options["end_tokens"]
    length = prompt + new
    state = new_beam_state(
        batch, num_beams, length, keep_beam_indices=True, keep_log_probs=True
    )  # fmt: skip
    parameters = beam_parameters(
        batch, num_beams, prompt_lengths=prompt, max_lengths=length, pad_tokens=ends[0], **options
    )
    state.sequences[:, :, :prompt] = ids[:, None]
    state.lengths.fill_(prompt)
    state.scores[:, 1:] = -1e9
    steps = 0
    while not bool(state.done.all()):
        rows = state.sequences[:, :, : prompt + steps].reshape(batch * num_beams, -1)
        log_probs = model(rows).logits[:, -1].log_softmax(-1).view(batch, num_beams, WORDS)
        flat = (log_probs + state.scores[:, :, None]).view(batch, -1)
        scores, index = flat.sort(descending=True, stable=True)
        index = index[:, : max(2, 1 + len(ends)) * num_beams]
        implementation(
            state, parameters, scores[:, : index.shape[1]], index % WORDS, index // WORDS,
            log_probs=log_probs.view(batch, -1).gather(1, index),
        )  # fmt: skip
        steps += 1
    return best(state, parameters, num_beams), steps


@pytest.mark.parametrize("implementation", ["op", "reference"])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@torch.no_grad()
def test_generate(
    model: GPT2LMHeadModel, length_penalty: float, early_stopping: Any, implementation: str
) -> None:
    step = lmdecode.beam_step if implementation == "op" else reference.beam_step
    best = lmdecode.beam_finalize if implementation == "op" else reference.beam_finalize
    for seed in range(12 if implementation == "op" else 3):
        choice = random.Random(f"{seed}/{early_stopping}/{length_penalty}")
        torch.manual_seed(choice.getrandbits(40))
        torch.nn.init.normal_(model.transformer.wte.weight, std=1.0)
        num_beams, new = choice.choice([2, 3, 5]), choice.choice([1, 3, 9])
        ids = torch.randint(8, WORDS, (choice.choice([1, 2, 3]), choice.choice([1, 4])))
        ends = choice.choice([[1], [1, 2], [1, 2, 3, 4, 5, 6, 7]])
        want = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=num_beams, max_new_tokens=new,
            length_penalty=length_penalty, early_stopping=early_stopping, eos_token_id=ends,
            pad_token_id=0, num_return_sequences=num_beams, do_sample=False,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        options = dict(
            end_tokens=ends, length_penalty=length_penalty, early_stopping=early_stopping
        )
        final, steps = searched(model, ids, num_beams, new, options, step, best)
        longest = int(final.lengths.max())
        rows, prompt = ids.shape[0] * num_beams, ids.shape[1]
        assert steps == len(want.scores)
        assert torch.equal(final.sequences[..., :longest].reshape(rows, -1), want.sequences)
        torch.testing.assert_close(
            final.scores.float().reshape(-1), want.sequences_scores, rtol=1e-5, atol=1e-5
        )
        indices = final.beam_indices[..., prompt:longest]
        first = torch.arange(len(ids), dtype=torch.int32)[:, None, None] * num_beams
        indices = indices + torch.where(indices >= 0, first, 0)
        assert torch.equal(indices.reshape(rows, -1), want.beam_indices.int())
        # The log-probs of a sequence sum up to its score, before the penalty.
        divisor = (final.lengths - prompt).double() ** length_penalty
        torch.testing.assert_close(
            final.log_probs.double().sum(-1) / divisor, final.scores, rtol=1e-4, atol=1e-4
        )
