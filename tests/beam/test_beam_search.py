"""The engine: rows and their order, requests that come and go, processors, coverage, results."""

import dataclasses
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_requests import VOCAB
from small_requests import small_request as _request
from small_requests import step_of as _step

import lmdecode
from lmdecode import BeamRequest, BeamSearch, BeamTrace, format_trace
from tests.support.beam_searches import TableModel, assert_same_result, random_request, run_requests


def _log_softmax_total(model: TableModel, tokens: list[int], prompt: int) -> float:
    """Sum of the log-probabilities of what follows the prompt, in float64."""
    total = 0.0
    for end in range(prompt, len(tokens)):
        row = model(torch.tensor([tokens[:end]]), torch.tensor([end]))[0].double()
        total += float(row.log_softmax(0)[tokens[end]])
    return total


def test_prompt_is_one_row_that_widens_to_beams(device: torch.device) -> None:
    model = TableModel(VOCAB, 1)
    engine = BeamSearch(device=device)
    first = engine.insert(_request(num_beams=3))
    assert engine.num_rows == 1 and engine.row_ranges() == {first: range(1)}
    out = _step(engine, model)
    assert out.parents.tolist() == [0, 0, 0] and out.finished == ()
    assert len(set(out.tokens.tolist())) == 3
    second = engine.insert(_request(4, 5, 6, num_beams=2))
    # New rows are the last.
    assert engine.row_ranges() == {first: range(3), second: range(3, 4)}
    out = _step(engine, model)
    assert out.parents[3:].tolist() == [3, 3] and all(p < 3 for p in out.parents[:3])
    assert engine.row_ranges() == {first: range(3), second: range(3, 5)}
    assert engine.running == (first, second) and engine.num_rows == 5


def test_tokens_and_parents_are_those_of_the_sequences() -> None:
    model = TableModel(VOCAB, 2)
    engine = BeamSearch()
    for number in range(3):
        engine.insert(_request(number + 1, num_beams=number + 2, max_new_tokens=9, eos_token_id=0))
    before = engine.input_ids()
    while engine.num_rows:
        out = _step(engine, model)
        ids, lengths = engine.input_ids()
        for row, (token, parent) in enumerate(zip(out.tokens, out.parents, strict=True)):
            length = int(lengths[row])
            assert ids[row, length - 1] == token
            assert before.lengths[parent] == length - 1
            assert torch.equal(ids[row, : length - 1], before.input_ids[parent, : length - 1])
        before = engine.input_ids()


def test_cache_follows_parents_alone() -> None:
    """A model with a state for each row, reordered by parents, is the model without one."""
    model = TableModel(VOCAB, 3)
    plain = run_requests(BeamSearch(), model, [(0, _request(num_beams=4, eos_token_id=5))])
    engine = BeamSearch()
    engine.insert(_request(num_beams=4, eos_token_id=5))
    cache = torch.tensor([[1, 2]])
    while engine.num_rows:
        lengths = torch.full((len(cache),), cache.shape[1])
        out = engine.step(model(cache, lengths))
        cache = torch.cat((cache.index_select(0, out.parents), out.tokens[:, None]), dim=1)
    assert_same_result(engine.pop_finished()[0], plain[0])


def test_scores_are_sums_of_log_probabilities() -> None:
    model = TableModel(VOCAB, 4)
    for penalty in (0.0, 1.0, 2.0, -1.0):
        request = _request(
            num_beams=4, num_return_sequences=4, length_penalty=penalty, eos_token_id=[3, 7]
        )
        result = run_requests(BeamSearch(), model, [(0, request)])[0]
        assert len(result.sequences) == 4
        assert result.scores.tolist() == sorted(result.scores.tolist(), reverse=True)
        for rank in range(4):
            length = int(result.lengths[rank])
            tokens = result.sequences[rank, :length].tolist()
            total = _log_softmax_total(model, tokens, 2)
            assert math.isclose(
                float(result.scores[rank]), total / (length - 2) ** penalty, rel_tol=1e-5
            )
            assert math.isclose(float(result.log_probs[rank].sum()), total, rel_tol=1e-5)
            assert result.new_tokens(rank) == tokens[2:]
            assert (result.sequences[rank, length:] == 3).all()  # the first end token pads
            assert (result.log_probs[rank, length - 2 :] == 0).all()
            assert (result.beam_indices[rank, length - 2 :] == -1).all()
            assert (result.beam_indices[rank, : length - 2] >= 0).all()


def test_wide_search_finds_the_best_sequence() -> None:
    """With as many beams as there are prefixes, beam search is exhaustive search."""
    model, vocab, new = TableModel(4, 5), 4, 3
    request = BeamRequest([1], max_new_tokens=new, num_beams=16, length_penalty=0.0)
    result = run_requests(BeamSearch(), model, [(0, request)])[0]
    best = max(
        _log_softmax_total(model, [1, a, b, c], 1)
        for a in range(vocab)
        for b in range(vocab)
        for c in range(vocab)
    )
    assert math.isclose(float(result.scores[0]), best, rel_tol=1e-5)


def test_finished_requests_leave_at_once_and_wait_for_pop() -> None:
    model = TableModel(VOCAB, 6)
    engine = BeamSearch()
    ids = [engine.insert(_request(n + 1, max_new_tokens=n + 1)) for n in range(3)]
    finished = []
    for rows in (6, 3, 0):
        out = _step(engine, model)
        finished += out.finished
        assert len(out.tokens) == len(out.parents) == rows == engine.num_rows
    assert finished == ids
    results = engine.pop_finished()
    assert [result.request_id for result in results] == ids
    assert [result.num_steps for result in results] == [1, 2, 3]
    assert engine.pop_finished() == []


def test_empty_step() -> None:
    out = BeamSearch(VOCAB).step(torch.zeros(0, VOCAB))
    assert out.tokens.shape == out.parents.shape == (0,) and out.finished == ()


def test_ids() -> None:
    engine = BeamSearch()
    assert engine.insert(_request(request_id="a")) == "a"
    assert engine.insert(_request(request_id=0)) == 0
    assert engine.insert(_request()) == 1  # 0 is taken
    assert engine.insert(_request()) == 2
    with pytest.raises(ValueError, match="request_id 'a' is that of a request which is running"):
        engine.insert(_request(request_id="a"))


def test_cancel() -> None:
    model = TableModel(VOCAB, 7)
    requests = [_request(n + 1, num_beams=n + 1, max_new_tokens=5) for n in range(3)]
    expected = run_requests(BeamSearch(), model, [(0, requests[0])])[0]
    engine = BeamSearch()
    ids = [engine.insert(request) for request in requests]
    _step(engine, model)
    waiting = engine.insert(_request(9))
    before = engine.input_ids()
    left = engine.cancel(ids[1])
    assert left.tolist() == [0, 3, 4, 5, 6]
    assert torch.equal(engine.input_ids().input_ids, before.input_ids[left])
    assert engine.cancel(waiting).tolist() == [0, 1, 2, 3]  # its one row is the last
    while engine.num_rows:
        _step(engine, model)
    results = {result.request_id: result for result in engine.pop_finished()}
    assert list(results) == [ids[0], ids[2]]
    assert_same_result(results[ids[0]], expected)
    with pytest.raises(ValueError, match=r"request_id is 1; expected one that is running: \[\]"):
        engine.cancel(ids[1])


@pytest.mark.parametrize("dialect", ["generate", "scorer", "fairseq"])
@pytest.mark.parametrize("at", [0, 2])
def test_failure_ends_one_request_alone(dialect: str, at: int) -> None:
    model = TableModel(VOCAB, 8)
    requests = [
        _request(n + 1, dialect=dialect, eos_token_id=0, max_new_tokens=7) for n in range(4)
    ]
    expected = run_requests(BeamSearch(), model, [(0, request) for request in requests])
    engine = BeamSearch()
    ids = [engine.insert(request) for request in requests]
    for step in range(7):
        if not engine.num_rows:
            break
        logits = model(*engine.input_ids())
        ranges = engine.row_ranges()
        if step == at:
            logits[ranges[ids[1]][-1], 4] = math.nan
            logits[ranges[ids[2]].start] = -math.inf
        finished = engine.step(logits).finished
        if step == at:
            assert finished == (ids[1], ids[2])
    results = {result.request_id: result for result in engine.pop_finished()}
    assert (results[ids[1]].status, results[ids[2]].status) == (1, 2)
    assert results[ids[1]].num_steps == at + 1
    for number in (0, 3):
        assert results[ids[number]].status == 0
        assert_same_result(results[ids[number]], expected[number])


def test_failed_group_ends_its_request() -> None:
    model = TableModel(VOCAB, 8)
    engine = BeamSearch()
    engine.insert(_request(num_beams=4, num_beam_groups=2, dialect="scorer"))
    _step(engine, model)
    logits = model(*engine.input_ids())
    logits[3] = math.nan
    assert engine.step(logits).finished == (0,)
    assert engine.pop_finished()[0].status == 1


def test_fewer_tokens_than_beams() -> None:
    """Beams that do not exist yet have transformers' score of -1e9 and are soon outranked."""
    logits = torch.full((1, 5), -math.inf)
    logits[0, 2] = 0.0
    for dialect in ("generate", "scorer", "fairseq"):
        engine = BeamSearch()
        engine.insert(_request(num_beams=3, dialect=dialect, max_new_tokens=3))
        out = engine.step(logits)
        assert out.tokens.tolist() == [2, 2, 2] and out.parents.tolist() == [0, 0, 0]
        out = engine.step(torch.arange(5.0).expand(3, 5))
        assert out.tokens.tolist() == [4, 3, 2] and out.parents.tolist() == [0, 0, 0]
        engine.step(torch.arange(5.0).expand(3, 5))
        assert engine.pop_finished()[0].sequences.tolist() == [[1, 2, 2, 4, 4]]


def test_beams_that_do_not_exist_follow_in_the_order_of_all_rows() -> None:
    """As ``log_softmax_top_k`` of as many equal rows, all but the first at -1e9, would have it."""
    logits = torch.full((1, 6), -math.inf)
    logits[0, [4, 1]] = torch.tensor([0.6, 0.4]).log()
    rows = torch.tensor([0.0, -1e9, -1e9, -1e9])
    expected = lmdecode.log_softmax_top_k(logits.expand(4, 6), rows, 8, num_beams=4)
    traces: list[BeamTrace] = []
    engine = BeamSearch(on_step=traces.append)
    engine.insert(_request(num_beams=4))
    engine.insert(_request(3, num_beams=2))  # of the same batch, and with tokens enough
    out = engine.step(torch.cat((logits, torch.arange(6.0)[None])))
    assert out.tokens.tolist() == [4, 1, 1, 4, 5, 4]
    candidates = traces[0].candidates
    assert [c.token for c in candidates] == expected.tokens[0].tolist()
    assert [c.beam for c in candidates] == expected.beams[0].tolist()
    assert [c.score for c in candidates] == expected.scores[0].tolist()
    assert [c.log_prob for c in candidates] == expected.log_probs[0].tolist()
    assert [c.score for c in traces[1].candidates] == sorted(
        (c.log_prob for c in traces[1].candidates), reverse=True
    )


def test_group_that_is_done_waits_for_the_others() -> None:
    engine = BeamSearch()
    engine.insert(
        _request(
            num_beams=2, num_beam_groups=2, diversity_penalty=9.0, dialect="scorer", eos_token_id=0,
            pad_token_id=5, early_stopping=True, num_return_sequences=2, max_new_tokens=3,
        )
    )  # fmt: skip
    out = engine.step(torch.tensor([[0.0, 4.0, 3.0, 0.0, 0.0, 0.0]]))
    assert out.tokens.tolist() == [1, 2]
    ends, goes_on = [9.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0, 1.0, 0.0]
    out = engine.step(torch.tensor([ends, goes_on]))
    assert out.finished == () and out.tokens.tolist() == [1, 3]
    out = engine.step(torch.tensor([goes_on, goes_on]))
    # The group that is done emits padding, of rows of its own; the penalty counts the padding.
    assert out.finished == (0,)
    result = engine.pop_finished()[0]
    assert result.groups.tolist() == [0, 1] and result.num_steps == 3
    assert result.sequences.tolist() == [[1, 2, 1, 0, 5], [1, 2, 2, 3, 3]]


def test_slots_are_used_again_and_grow() -> None:
    model = TableModel(VOCAB, 9)
    engine = BeamSearch(slots=1, num_beams=1, capacity=1)
    engine.insert(_request(max_new_tokens=30, num_beams=2, eos_token_id=0))
    for wide in range(1, 12):
        engine.insert(_request(wide, num_beams=wide, max_new_tokens=1 + wide % 3))
        _step(engine, model)
    while engine.num_rows:
        _step(engine, model)
    slots = len(engine._store.state.lengths)
    assert slots <= 8 and len(engine._store._free) == slots
    assert len(engine.pop_finished()) == 12


def test_mixed_dialects_and_groups_in_one_batch() -> None:
    model = TableModel(VOCAB, 10)
    requests = [
        _request(n + 1, dialect=dialect, num_beams=beams, num_beam_groups=groups,
                 eos_token_id=[n % 3], num_return_sequences=beams)
        for n, (dialect, beams, groups) in enumerate(
            [("generate", 3, 1), ("scorer", 4, 2), ("fairseq", 2, 1), ("scorer", 2, 1),
             ("generate", 6, 3), ("scorer", 3, 1)]
        )
    ]  # fmt: skip
    together = run_requests(BeamSearch(), model, [(0, request) for request in requests])
    for number, request in enumerate(requests):
        alone = run_requests(BeamSearch(), model, [(0, request)])[0]
        assert_same_result(together[number], alone, request)
    assert set(together[1].groups.tolist()) == {0, 1}


def test_token_bitmask_is_by_row() -> None:
    """Each beam may go on with tokens of its own; also where groups and prompts are apart."""
    model = TableModel(VOCAB, 16)
    engine = BeamSearch()
    for request in (_request(num_beams=4, num_beam_groups=2, dialect="scorer"), _request(3)):
        engine.insert(request)
    for step in range(3):
        rows = engine.num_rows
        allowed = torch.zeros(rows, VOCAB, dtype=torch.bool)
        for row in range(rows):
            allowed[row, [(row + step + i) % VOCAB for i in range(4)]] = True
        bits = (allowed.int() << torch.arange(VOCAB, dtype=torch.int32)).sum(1, dtype=torch.int32)
        out = engine.step(model(*engine.input_ids()), token_bitmask=bits[:, None])
        for token, parent in zip(out.tokens.tolist(), out.parents.tolist(), strict=True):
            assert allowed[parent, token]


def test_diversity_penalty_keeps_groups_apart() -> None:
    model = TableModel(VOCAB, 17)

    def firsts(penalty: float) -> list[int]:
        engine = BeamSearch()
        engine.insert(_request(num_beams=3, num_beam_groups=3, diversity_penalty=penalty))
        return _step(engine, model).tokens.tolist()

    assert len(set(firsts(0.0))) == 1
    assert len(set(firsts(100.0))) == 3


@pytest.mark.parametrize("dialect", ["generate", "scorer", "fairseq"])
def test_processors_of_each_request(dialect: str) -> None:
    """Each request is held to its own rules, in one batch."""
    model = TableModel(VOCAB, 18)
    base = {"dialect": dialect, "eos_token_id": 0, "num_return_sequences": 3, "max_new_tokens": 8}
    requests = [
        _request(**base), _request(**base, min_new_tokens=8),
        _request(**base, suppress_tokens=[1, 2, 3, 4]), _request(**base, no_repeat_ngram_size=1),
        _request(5, **base, forced_bos_token_id=9),
        _request(**base, forced_eos_token_id=0, min_new_tokens=1),
        _request(**base, logit_bias={6: 50.0, 99: 1.0}), _request(**base, repetition_penalty=1e4),
    ]  # fmt: skip
    results = run_requests(BeamSearch(), model, list(enumerate(requests)))
    new = [[results[n].new_tokens(rank) for rank in range(3)] for n in range(len(requests))]
    assert all(len(tokens) >= 7 for tokens in new[1])
    assert not any({1, 2, 3, 4} & set(tokens) for tokens in new[2])
    assert all(len({1, 2, *tokens}) == len(tokens) + 2 for tokens in new[3])
    assert all(tokens[0] == 9 for tokens in new[4])
    assert all(len(tokens) < 8 or tokens[-1] == 0 for tokens in new[5])
    assert set(new[6][0]) == {6}
    assert len({1, 2, *new[7][0]}) == len(new[7][0]) + 2
    for number, request in enumerate(requests):
        assert_same_result(
            results[number], run_requests(BeamSearch(), model, [(0, request)])[0], request
        )


def test_patience_keeps_more_hypotheses() -> None:
    model = TableModel(VOCAB, 11)
    base = {"num_beams": 2, "max_new_tokens": 20, "early_stopping": True, "eos_token_id": [0, 1]}
    steps = [
        run_requests(BeamSearch(), model, [(0, _request(patience=patience, **base))])[0].num_steps
        for patience in (0.5, 1.0, 2.0, 4.0)
    ]
    assert steps == sorted(steps) and steps[0] < steps[-1]
    assert _request(num_beams=5, patience=0.5).num_hypotheses == 3  # halves go up, as in C
    assert _request(num_beams=2, patience=0.1).num_hypotheses == 1


def _attention_table(source: int) -> torch.Tensor:
    """[VOCAB, source] the attention after each token."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(VOCAB, source, generator=generator).softmax(1)


def _run_with_attention(
    requests: list[BeamRequest], model: TableModel, attention: torch.Tensor
) -> lmdecode.BeamResult:
    """Return the result of the last request."""
    engine = BeamSearch()
    last_id = [engine.insert(request) for request in requests][-1]
    while engine.num_rows:
        ids, lengths = engine.input_ids()
        last = ids.gather(1, lengths[:, None] - 1).squeeze(1)
        engine.step(model(ids, lengths), attention=attention[last])
    return next(r for r in engine.pop_finished() if r.request_id == last_id)


def test_coverage_penalty() -> None:
    """Against the formula of Wu et al. on the sequences that were found."""
    model, attention, weight = TableModel(VOCAB, 12), _attention_table(5), 0.7
    request = _request(
        num_beams=4, num_return_sequences=4, coverage_penalty=weight, eos_token_id=0,
        max_new_tokens=8,
    )  # fmt: skip
    result = _run_with_attention([request], model, attention)
    for rank in range(4):
        tokens = result.sequences[rank, : int(result.lengths[rank])].tolist()
        coverage = sum(attention[token] for token in tokens[1:-1])
        bonus = weight * float(coverage.double().clamp(max=1).log().sum())
        total = _log_softmax_total(model, tokens, 2) / (len(tokens) - 2)
        assert math.isclose(float(result.scores[rank]), total + bonus, rel_tol=1e-5)
    plain = dataclasses.replace(request, coverage_penalty=0.0)
    other = run_requests(BeamSearch(), model, [(0, plain)])[0]
    assert not torch.equal(other.scores, result.scores)


def test_coverage_does_not_depend_on_the_batch() -> None:
    """Others' sources are longer: zeros behind the end of this one's."""
    model, attention = TableModel(VOCAB, 12), _attention_table(5)
    request = _request(num_beams=4, num_return_sequences=4, coverage_penalty=0.7, eos_token_id=0)
    alone = _run_with_attention([request], model, attention)
    padded = torch.nn.functional.pad(attention, (0, 3))
    others = [
        _request(5, num_beams=2),
        _request(6, num_beams=4, num_beam_groups=2, coverage_penalty=0.1),
    ]
    together = _run_with_attention([*others, request], model, padded)
    assert_same_result(together, alone)


def test_coverage_begins_at_zero_in_a_used_slot() -> None:
    model, attention = TableModel(VOCAB, 12), _attention_table(5)
    request = _request(num_beams=3, num_return_sequences=3, coverage_penalty=0.7, eos_token_id=0)
    engine = BeamSearch(slots=1)
    results = []
    for _ in range(2):
        engine.insert(request)
        while engine.num_rows:
            ids, lengths = engine.input_ids()
            last = ids.gather(1, lengths[:, None] - 1).squeeze(1)
            engine.step(model(ids, lengths), attention=attention[last])
        results += engine.pop_finished()
    assert_same_result(results[1], results[0])


def test_coverage_penalty_needs_attention() -> None:
    engine = BeamSearch()
    engine.insert(_request(coverage_penalty=0.5))
    with pytest.raises(ValueError, match=r"attention is None; expected \[1, source\]"):
        engine.step(torch.zeros(1, VOCAB))
    with pytest.raises(ValueError, match=r"attention has shape \[2, 3\]; expected \[1, source\]"):
        engine.step(torch.zeros(1, VOCAB), attention=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"coverage_penalty is 0\.5; expected 0 with"):
        _request(coverage_penalty=0.5, dialect="scorer")


ROW_VOCAB = 13

_settings = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _model(seed: int) -> TableModel:
    """Every other model has logits of few values: candidates tie, within beams and across."""
    return TableModel(ROW_VOCAB, seed, levels=2 * (seed % 2))


@_settings
@given(
    seed=st.integers(0, 10**6),
    arrivals=st.lists(st.integers(0, 12), min_size=1, max_size=7),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 40)),
)
def test_any_batch_any_time_any_slot(
    seed: int, arrivals: list[int], sizes: tuple[int, int, int]
) -> None:
    choice = random.Random(seed)
    model = _model(seed)
    requests = [random_request(choice, ROW_VOCAB) for _ in arrivals]
    slots, num_beams, capacity = sizes
    engine = BeamSearch(slots=slots, num_beams=num_beams, capacity=capacity)
    # Slots that others have left behind, in an order of their own.
    earlier = [(number % 4, random_request(choice, ROW_VOCAB)) for number in range(5)]
    run_requests(engine, model, earlier)
    together = run_requests(engine, model, list(zip(arrivals, requests, strict=True)))
    for number, request in enumerate(requests):
        alone = run_requests(BeamSearch(), model, [(0, request)])[0]
        assert_same_result(together[number], alone, request)


@_settings
@given(seed=st.integers(0, 10**6), victim=st.integers(0, 3), at=st.integers(0, 4))
def test_cancelled_requests_leave_no_trace(seed: int, victim: int, at: int) -> None:
    choice = random.Random(seed)
    model = _model(seed)
    requests = [random_request(choice, ROW_VOCAB, max_new_tokens=8) for _ in range(4)]
    engine = BeamSearch(slots=1)
    ids = [engine.insert(request) for request in requests]
    step = 0
    while engine.num_rows:
        if step == at and ids[victim] in engine.running:
            engine.cancel(ids[victim])
            if not engine.num_rows:
                break
        engine.step(model(*engine.input_ids()))
        step += 1
    for result in engine.pop_finished():
        alone = run_requests(BeamSearch(), model, [(0, requests[ids.index(result.request_id)])])[0]
        assert_same_result(result, alone)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thread_count(threads: int) -> None:
    """A vocabulary that is worth threads, against one thread."""
    vocab, model = 40009, TableModel(40009, 3, entries=31, levels=3)
    requests = [
        BeamRequest([n + 1], max_new_tokens=5, num_beams=n + 1, eos_token_id=7, dialect=dialect)
        for n, dialect in enumerate(("generate", "scorer", "fairseq"))
    ]
    before = torch.get_num_threads()
    results = []
    try:
        for number in (1, threads):
            torch.set_num_threads(number)
            results.append(run_requests(BeamSearch(vocab), model, [(0, r) for r in requests]))
    finally:
        torch.set_num_threads(before)
    for number in range(len(requests)):
        assert_same_result(results[1][number], results[0][number])


@_settings
@given(seed=st.integers(0, 10**6))
def test_steps_of_a_request_are_independent_of_its_neighbours_failures(seed: int) -> None:
    choice = random.Random(seed)
    model = _model(seed)
    request = random_request(choice, ROW_VOCAB)
    alone = run_requests(BeamSearch(), model, [(0, request)])[0]
    engine = BeamSearch()
    mine = engine.insert(replace(request, request_id="mine"))
    while mine in engine.running:
        broken = engine.insert(random_request(choice, ROW_VOCAB))
        logits = model(*engine.input_ids())
        logits[engine.row_ranges()[broken].start] = choice.choice((torch.nan, -torch.inf))
        assert broken in engine.step(logits).finished
    result = next(r for r in engine.pop_finished() if r.request_id == mine)
    assert_same_result(result, alone)


def _traces(request: BeamRequest, model: TableModel) -> tuple[list[BeamTrace], lmdecode.BeamResult]:
    traces: list[BeamTrace] = []
    result = run_requests(BeamSearch(on_step=traces.append), model, [(0, request)])[0]
    return traces, result


def test_trace_holds_every_candidate_and_decision() -> None:
    model = TableModel(VOCAB, 13)
    request = _request(num_beams=3, num_return_sequences=3, eos_token_id=[2, 5], max_new_tokens=8)
    traces, result = _traces(request, model)
    assert [trace.step for trace in traces] == list(range(result.num_steps))
    assert [trace.done for trace in traces] == [False] * (result.num_steps - 1) + [True]
    sequences = [(1, 2)]
    scores = [0.0]
    for trace in traces:
        assert len(trace.candidates) == 9  # (1 + 2 end tokens) * 3
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        log_probs = model(torch.tensor(sequences), lengths).double().log_softmax(1)
        for candidate in trace.candidates:
            log_prob = float(log_probs[candidate.beam, candidate.token])
            assert math.isclose(candidate.log_prob, log_prob, rel_tol=1e-5)
            assert math.isclose(candidate.score, scores[candidate.beam] + log_prob, rel_tol=1e-5)
            if candidate.decision == "closed":
                tokens = (*sequences[candidate.beam][2:], candidate.token)
                held = {ended.place: ended.tokens for ended in trace.hypotheses}
                later = [c.place for c in trace.candidates if c.decision == "closed"]
                if later.count(candidate.place) == 1:
                    assert held[candidate.place] == tokens
        going = [c for c in trace.candidates if c.decision == "continued"]
        if not trace.done:
            assert [c.place for c in going] == [0, 1, 2]
            assert [beam.parent for beam in trace.beams] == [c.beam for c in going]
            sequences = [(*sequences[c.beam], c.token) for c in going]
            assert [(1, 2, *beam.tokens) for beam in trace.beams] == sequences
            scores = [beam.score for beam in trace.beams]
    best = sorted((ended.score for ended in traces[-1].hypotheses), reverse=True)
    assert best == result.scores.tolist()


def test_trace_is_that_of_the_request_alone() -> None:
    model = TableModel(VOCAB, 14)
    request = _request(num_beams=2, eos_token_id=3)
    alone, _ = _traces(request, model)
    together: list[BeamTrace] = []
    engine = BeamSearch(on_step=together.append)
    run_requests(
        engine, model, [(0, _request(7, num_beams=5, eos_token_id=[1, 2, 4])), (1, request)]
    )
    mine = [trace._replace(request_id=0) for trace in together if trace.request_id == 1]
    assert mine == alone


def test_format_trace() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    traces: list[BeamTrace] = []
    engine = BeamSearch(on_step=traces.append)
    engine.insert(_request(num_beams=2, eos_token_id=1, request_id="r"))
    engine.step(logits)
    assert format_trace(traces[0]).splitlines() == [
        "request r, step 0, group 0: goes on",
        "  rank  beam    token     log-prob        score  decision",
        "     0     0        0    -0.693147    -0.693147  continued, beam 0",
        "     1     0        1    -1.203973    -1.203973  closed, place 0",
        "     2     0        2    -1.897120    -1.897120  continued, beam 1",
        "     3     0        3    -2.995732    -2.995732  unused",
        "  beam     0    -0.693147  from 0: 0",
        "  beam     1    -1.897120  from 0: 2",
        "  ended    0    -1.203973: 1",
    ]
    text = format_trace(traces[0], lambda tokens: "".join("abcd"[token] for token in tokens))
    assert text.splitlines()[2].endswith("continued, beam 0  'a'")
    assert text.splitlines()[-1].endswith("-1.203973: 'b'")
