"""Requests of a few tokens for ``BeamSearch``, and a step of it by a language model in a table."""

import lmdecode
from lmdecode import BeamRequest, BeamSearch
from tests.support.beam_searches import TableModel

VOCAB = 13


def small_request(*prompt: int, **arguments: object) -> BeamRequest:
    return BeamRequest(prompt or (1, 2), **{"max_new_tokens": 6, "num_beams": 3, **arguments})


def step_of(engine: BeamSearch, model: TableModel) -> lmdecode.BeamSearchOutput:
    return engine.step(model(*engine.input_ids()))
