"""The decoding loop that every kind of beam search shares."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from lmdecode.decoder.stepwise import StepwiseModel


class NextBeams(NamedTuple):
    """Beams after a step: [rows, length + 1] int64.

    ``parents``, [rows] int64, is the row that each beam continues; None if each continues its own.
    ``finished``: every search has ended.
    """

    sequences: Tensor
    parents: Tensor | None
    finished: bool


class SearchResult(NamedTuple):
    """The best sequences, [batch * num_return_sequences, length] int64, and their scores.

    ``beam_indices``, [n, generated tokens] int32, is the row of each step's scores that a token
    comes from, -1 after the end.
    """

    sequences: Tensor
    scores: Tensor
    beam_indices: Tensor | None


class Search(Protocol):
    """One kind of beam search."""

    def step(self, logits: Tensor, input_ids: Tensor) -> NextBeams:
        """Choose the next beams for beams of [rows, length] int64.

        ``logits``, [rows, V], is a view of the model's in its dtype.
        """

    def finish(self, input_ids: Tensor) -> SearchResult:
        """Return the result; input_ids are the beams, [rows, length], after the last step."""


def run_search(model: StepwiseModel, search: Search, input_ids: Tensor) -> Tensor:
    """Run the model and the search in turns until the search has finished.

    ``input_ids``, [rows, S] int64, are the prompts, once for each beam. Returns the beams after the
    last step, [rows, length], for ``search.finish``.
    """
    logits = model.read_prompts(input_ids)
    while True:
        input_ids, parents, finished = search.step(logits, input_ids)
        del logits  # frees the logits of a long prompt
        if parents is not None:
            model.reorder(parents)
        if finished:
            return input_ids
        logits = model.read(input_ids)
