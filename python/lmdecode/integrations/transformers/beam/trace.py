"""Beam search of transformers and of ``BeamSearch``, compared step by step on the same logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest
from lmdecode.beam.engine.search import BeamSearch
from lmdecode.beam.engine.trace import BeamTrace
from lmdecode.beam.types import REAL_BEAM_SCORE_BOUND
from lmdecode.generation_options import NEUTRAL, option_names
from lmdecode.integrations.transformers.decoding.requests import request_options

__all__ = ["BeamComparison", "compare_with_transformers"]

_OP = "compare_with_transformers"
# Settings that would change the logits.
_UNSUPPORTED = sorted(("bad_words_ids", *option_names("processor")))


class BeamComparison(NamedTuple):
    """How two beam searches compare.

    Attributes
    ----------
    difference : str or None
        The first difference: step, request, place, and both values.
    traces : tuple of BeamTrace
        Traces of ``BeamSearch``, up to the first difference.
    num_steps, num_candidates : int
        Number of steps and candidates compared.
    """

    difference: str | None
    traces: tuple[BeamTrace, ...]
    num_steps: int
    num_candidates: int

    def __str__(self) -> str:
        """Return the difference, or a sentence that there is none."""
        if self.difference is not None:
            return self.difference
        return f"no difference: {self.num_steps} steps, {self.num_candidates} candidates"


class _Entry(NamedTuple):
    """A candidate, beam or hypothesis on either side."""

    score: float
    tokens: tuple[int, ...]
    beam: int | None = None
    used: bool = True  # an unused candidate may change places with an equal one

    def __str__(self) -> str:
        beam = "" if self.beam is None else f" of beam {self.beam}"
        return f"{' '.join(map(str, self.tokens))}{beam}, score {self.score:.7g}"


@dataclass
class _RecordedStep:
    """Record of a step of transformers: for each request, three lists of entries."""

    candidates: list[list[_Entry]] = field(default_factory=list)
    beams: list[list[_Entry]] = field(default_factory=list)
    hypotheses: list[list[_Entry]] = field(default_factory=list)


@dataclass
class _Recording:
    config: Any = None
    input_ids: Tensor | None = None
    steps: list[_RecordedStep] = field(default_factory=list)


def _entries(scores: Tensor, sequences: Tensor, beams: Tensor | None = None) -> list[list[_Entry]]:
    """Scores [B, n], sequences [B, n, new tokens], beams [B, n] to entries of each request."""
    beam_rows = beams.tolist() if beams is not None else [[None] * scores.shape[1]] * len(scores)
    return [
        [
            _Entry(score, tuple(tokens), beam)
            for score, tokens, beam in zip(row_scores, row_tokens, row_beams, strict=True)
        ]
        for row_scores, row_tokens, row_beams in zip(
            scores.tolist(), sequences.tolist(), beam_rows, strict=True
        )
    ]


@contextmanager
def _recorded(model: Any) -> Iterator[_Recording]:
    """Record the calls of the methods of a model's beam search."""
    recording = _Recording()
    prefill, top_k = model._prefill, model._get_top_k_continuations
    running, finished = model._get_running_beams_for_next_iteration, model._update_finished_beams

    def record_prefill(input_ids: Tensor, generation_config: Any, *args: Any, **kw: Any) -> Any:
        recording.config, recording.input_ids = generation_config, input_ids.clone()
        return prefill(input_ids, generation_config, *args, **kw)

    def record_top_k(**kw: Any) -> Any:
        scores, sequences, indices = result = top_k(**kw)
        length, prompt = kw["cur_len"], kw["decoder_prompt_len"]
        first = torch.arange(len(scores), device=scores.device)[:, None] * kw["num_beams"]
        beams = indices[:, :, length - prompt] - first
        recording.steps.append(
            _RecordedStep(_entries(scores, sequences[:, :, length : length + 1], beams))
        )
        return result

    def record_running(**kw: Any) -> Any:
        sequences, scores, _ = result = running(**kw)
        assert recording.input_ids is not None
        prompt = recording.input_ids.shape[1]
        end = prompt + len(recording.steps)
        recording.steps[-1].beams = _entries(scores, sequences[:, :, prompt:end])
        return result

    def record_finished(**kw: Any) -> Any:
        sequences, scores, indices, is_finished = result = finished(**kw)
        prompt = kw["decoder_prompt_len"]
        lengths = (indices >= 0).sum(dim=2).tolist()
        recording.steps[-1].hypotheses = [
            [
                entry._replace(tokens=entry.tokens[:length])
                for entry, length, ended in zip(row, row_lengths, row_ended, strict=True)
                if ended
            ]
            for row, row_lengths, row_ended in zip(
                _entries(scores, sequences[:, :, prompt:]), lengths, is_finished.tolist(),
                strict=True,
            )
        ]  # fmt: skip
        return result

    wrappers = {
        "_prefill": record_prefill,
        "_get_top_k_continuations": record_top_k,
        "_get_running_beams_for_next_iteration": record_running,
        "_update_finished_beams": record_finished,
    }
    for name, wrapper in wrappers.items():
        setattr(model, name, wrapper)
    try:
        yield recording
    finally:
        for name in wrappers:
            delattr(model, name)


def _requests(recording: _Recording) -> list[BeamRequest]:
    """Return the requests that a call of ``generate()`` made."""
    config, input_ids = recording.config, recording.input_ids
    assert input_ids is not None
    for name in _UNSUPPORTED:
        if (value := getattr(config, name, None)) not in (None, NEUTRAL[name]):
            raise ValueError(f"{_OP}: {name} is {value!r}; expected none: it is not compared")
    if config.do_sample:
        raise ValueError(f"{_OP}: do_sample is True; expected beam search without sampling")
    try:
        options = request_options(config, input_ids.shape[1])
    except ValueError as error:
        raise ValueError(f"{_OP}: {error}") from None
    return [BeamRequest(row, **options) for row in input_ids[:: config.num_beams]]


def _first_difference(
    what: str, ours: list[_Entry], theirs: list[_Entry], tolerance: float
) -> str | None:
    """Compare two lists of entries without unused beams."""
    ours = [entry for entry in ours if entry.score > REAL_BEAM_SCORE_BOUND]
    theirs = [entry for entry in theirs if entry.score > REAL_BEAM_SCORE_BOUND]
    for rank in range(max(len(ours), len(theirs))):
        here = ours[rank] if rank < len(ours) else None
        there = theirs[rank] if rank < len(theirs) else None
        close = False
        if here is not None and there is not None:
            close = abs(here.score - there.score) <= tolerance * max(1.0, abs(there.score))
            if close and (here[1:3] == there[1:3] or not here.used):
                continue
        difference = f"{what} {rank} is {here or 'missing'}"
        difference += f"; in transformers {there or 'it is missing'}"
        return difference + (" (equal scores, within the tolerance)" if close else "")
    return None


def _compare(trace: BeamTrace, step: _RecordedStep, request: int, tolerance: float) -> str | None:
    """Compare a step of one request."""
    best = sorted(trace.hypotheses, key=lambda ended: -ended.score)
    ours = {
        "candidate": [
            _Entry(c.score, (c.token,), c.beam, c.decision != "unused") for c in trace.candidates
        ],
        "hypothesis": [_Entry(h.score, h.tokens) for h in best],
        "beam": [_Entry(b.score, b.tokens) for b in trace.beams],
    }
    theirs = {
        "candidate": step.candidates[request],
        "hypothesis": step.hypotheses[request],
        "beam": step.beams[request],
    }
    for what, entries in ours.items():
        difference = _first_difference(what, entries, theirs[what], tolerance)
        if difference is not None:
            return f"step {trace.step}, request {request}: {difference}"
    return None


def compare_with_transformers(
    model: Any, input_ids: Tensor, *, tolerance: float = 1e-5, **generate_kwargs: Any
) -> BeamComparison:
    """Run ``model.generate()`` and ``BeamSearch`` on its logits; report the first difference.

    It compares every step: candidates with their beams and scores, hypotheses and continued beams;
    then the end of the search and its results. If scores are equal within the tolerance, rounding
    decides the order, and the searches may diverge: the report mentions it. Unused candidates may
    change places with equal ones.

    Parameters
    ----------
    model
        A model of transformers 5 with ``generate()``.
    input_ids : Tensor
        [B, length] int64, as for ``generate()``: each row is a request.
    tolerance
        Of scores, relative to them from 1 on.
    **generate_kwargs
        As for ``generate()``, ``num_beams`` above 1. Custom processors and stopping criteria
        are not compared.

    Returns
    -------
    BeamComparison
        Its text is the first difference, or a sentence that there is none.

    Raises
    ------
    ValueError
        A setting that is not compared.
    """
    for name in ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"):
        if generate_kwargs.get(name):
            raise ValueError(f"{_OP}: {name} is given; expected none: it is not compared")
    with _recorded(model) as recording:
        output = model.generate(input_ids, **generate_kwargs, return_dict_in_generate=True,
                                output_scores=True, output_logits=True)  # fmt: skip
    if not recording.steps:
        raise ValueError(f"{_OP}: generate() made no beam search; expected num_beams above 1")
    requests = _requests(recording)
    traces: list[BeamTrace] = []
    engine = BeamSearch(device=output.logits[0].device, on_step=traces.append)
    numbers = {engine.insert(request): number for number, request in enumerate(requests)}
    compared = 0

    def outcome(difference: str | None, steps: int) -> BeamComparison:
        return BeamComparison(difference, tuple(traces), steps, compared)

    for number, (step, logits) in enumerate(zip(recording.steps, output.logits, strict=True)):
        if not engine.running:
            return outcome(f"step {number}: all is done; transformers goes on", number)
        width = requests[0].num_beams
        rows = [
            numbers[request_id] * width + row
            for request_id, its in engine.row_ranges().items()
            for row in range(len(its))
        ]
        before = len(traces)
        engine.step(logits[rows])
        for trace in traces[before:]:
            difference = _compare(trace, step, numbers[trace.request_id], tolerance)
            if difference is not None:
                return outcome(difference, number + 1)
            compared += len(trace.candidates)
    steps = len(recording.steps)
    if engine.running:
        left = [numbers[request_id] for request_id in engine.running]
        return outcome(f"step {steps}: requests {left} go on; transformers has ended", steps)
    count = requests[0].num_return_sequences
    for result in engine.pop_finished():
        request = numbers[result.request_id]
        theirs = output.sequences[request * count : (request + 1) * count]
        for rank in range(len(result.sequences)):
            tokens = result.sequences[rank, : int(result.lengths[rank])]
            if not torch.equal(theirs[rank, : len(tokens)], tokens):
                return outcome(
                    f"result of request {request}: sequence {rank} is {tokens.tolist()}; "
                    f"in transformers {theirs[rank].tolist()}",
                    steps,
                )
    return outcome(None, steps)
