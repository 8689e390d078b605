"""Former names of arguments: accepted, with the results of the present ones."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode import beam, sampling
from lmdecode._checks import former_names
from lmdecode.beam import state

LOGITS = torch.tensor([[0.5, 2.0, 2.0, -1.0]])


def _sampler(**names: str) -> object:
    sampler = lmdecode.Sampler(1, 4, top_p=0.5, seed=1, return_logits=True, **names)
    logits = sampler.sample(LOGITS).kept_logits
    assert logits is not None
    return sampler.dialect, sampler.order, logits.tolist()


def _request(**names: Any) -> object:
    request = lmdecode.BeamRequest([1], max_new_tokens=1, **names)
    return request.dialect, request.rules


def _call() -> tuple[lmdecode.BeamState, lmdecode.BeamParameters]:
    return lmdecode.new_beam_state(1, 2, 3), lmdecode.beam_parameters(1, 2)


def _step(**names: Any) -> object:
    scores = torch.tensor([[-1.0, -torch.inf]])
    tokens = torch.tensor([[1, 2]])
    step = lmdecode.beam_step(*_call(), scores, tokens, torch.tensor([[0, 0]]), **names)
    return [part.tolist() for part in step]


def _finalize(**names: Any) -> object:
    searches, parameters = _call()
    searches.lengths.fill_(2)
    return [part.tolist() for part in lmdecode.beam_finalize(searches, parameters, 1, **names)]


CALLS: list[tuple[str, str, str, Callable[..., object]]] = [
    ("Sampler", "order", "vllm", _sampler),
    ("BeamRequest", "rules", "scorer", _request),
    ("beam_step", "rules", "scorer", _step),
    ("beam_finalize", "rules", "scorer", _finalize),
]


@pytest.mark.parametrize(("op", "former", "value", "call"), CALLS, ids=[c[0] for c in CALLS])
def test_a_former_name_is_the_present_one(
    op: str, former: str, value: str, call: Callable[..., object]
) -> None:
    assert call(**{former: value}) == call(dialect=value) != call()
    error = f"{op}: dialect and {former}, its former name, are both given; expected dialect alone"
    with pytest.raises(TypeError, match=error):
        call(**{former: value, "dialect": value})


ENGINES: list[tuple[Callable[..., object], str]] = [
    (lmdecode.Engine, "order"),
    (lmdecode.Decoding.engine, "order"),
    (lmdecode.Engine.submit, "rules"),
]


@pytest.mark.parametrize(
    ("function", "former"), ENGINES, ids=[function.__qualname__ for function, _ in ENGINES]
)
def test_engines_take_a_former_name(function: Callable[..., object], former: str) -> None:
    with pytest.raises(
        TypeError, match=rf"(E|\.e)ngine(\.submit)?: dialect and {former}, its former"
    ):
        function(None, **{former: "vllm", "dialect": "vllm"})
    assert former not in inspect.signature(function).parameters


def test_former_names_of_classes() -> None:
    assert lmdecode.StepOutput is beam.StepOutput is lmdecode.BeamSearchOutput
    assert lmdecode.RowTokens is beam.RowTokens is lmdecode.BeamSequences


def test_former_names_of_constants() -> None:
    assert sampling.ORDERS is sampling.SAMPLER_DIALECTS
    assert state.RULES is state.SEARCH_DIALECTS
    assert state.Rules is state.SearchDialect


def test_a_class_and_its_copies_keep_what_they_were() -> None:
    request = beam.BeamRequest([1], max_new_tokens=1, rules="fairseq")
    assert [field.name for field in dataclasses.fields(request)].count("dialect") == 1
    assert dataclasses.replace(request, num_beams=2).dialect == "fairseq"
    assert "rules" not in inspect.signature(beam.BeamRequest).parameters


def test_other_arguments_pass() -> None:
    @former_names("add", first="a", second="b")
    def add(a: int, b: int = 2, **others: int) -> tuple[int, int, dict[str, int]]:
        """Add."""
        return a, b, others

    assert add(1) == add(first=1) == (1, 2, {})  # type: ignore[call-arg]
    assert add(1, second=3, c=4) == (1, 3, {"c": 4})
    assert (add.__name__, add.__doc__) == ("add", "Add.")
    with pytest.raises(TypeError, match="multiple values for argument 'a'"):
        add(1, first=2)
