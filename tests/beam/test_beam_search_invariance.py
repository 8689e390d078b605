"""The result of a request depends on nothing but the request: not on batch, time, slot, threads."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmdecode import BeamRequest, BeamSearch
from tests.support.beam_searches import TableModel, assert_same_result, random_request, run_requests

VOCAB = 13

_settings = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _model(seed: int) -> TableModel:
    """Every other model has logits of few values: candidates tie, within beams and across."""
    return TableModel(VOCAB, seed, levels=2 * (seed % 2))


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
    requests = [random_request(choice, VOCAB) for _ in arrivals]
    slots, num_beams, capacity = sizes
    engine = BeamSearch(slots=slots, num_beams=num_beams, capacity=capacity)
    # Slots that others have left behind, in an order of their own.
    earlier = [(number % 4, random_request(choice, VOCAB)) for number in range(5)]
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
    requests = [random_request(choice, VOCAB, max_new_tokens=8) for _ in range(4)]
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
    request = random_request(choice, VOCAB)
    alone = run_requests(BeamSearch(), model, [(0, request)])[0]
    engine = BeamSearch()
    mine = engine.insert(replace(request, request_id="mine"))
    while mine in engine.running:
        broken = engine.insert(random_request(choice, VOCAB))
        logits = model(*engine.input_ids())
        logits[engine.row_ranges()[broken].start] = choice.choice((torch.nan, -torch.inf))
        assert broken in engine.step(logits).finished
    result = next(r for r in engine.pop_finished() if r.request_id == mine)
    assert_same_result(result, alone)
