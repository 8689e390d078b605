"""Traces of the engine: every candidate and what became of it, as data and as text."""

import math

import torch
from small_requests import VOCAB
from small_requests import small_request as _request

import lmdecode
from lmdecode import BeamRequest, BeamSearch, BeamTrace, format_trace
from tests.support.beam_searches import TableModel, run_requests


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
