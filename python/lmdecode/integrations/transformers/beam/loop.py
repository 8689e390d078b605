"""The decoding loop that every kind of beam search shares."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from lmdecode.decoder.stepwise import StepwiseModel


class NextBeams(NamedTuple):
    """Beams after a step.

    Attributes
    ----------
    sequences : Tensor
        [rows, length + 1] int64: the next beams.
    parents : Tensor or None
        [rows] int64: the row that each beam continues; None if each continues its own.
    finished : bool
        Whether every search has ended.
    """

    sequences: Tensor
    parents: Tensor | None
    finished: bool


class SearchResult(NamedTuple):
    """The best sequences: [batch * num_return_sequences, ...].

    Attributes
    ----------
    sequences : Tensor
        [n, length] int64.
    scores : Tensor
        [n] float32.
    beam_indices : Tensor or None
        [n, generated tokens] int32: the row of each step's scores that a token comes from, -1
        after the end.
    """

    sequences: Tensor
    scores: Tensor
    beam_indices: Tensor | None


class Search(Protocol):
    """One kind of beam search."""

    def step(self, logits: Tensor, input_ids: Tensor) -> NextBeams:
        """Choose the next beams.

        Parameters
        ----------
        logits
            [rows, V], a view of the model's in its dtype.
        input_ids
            [rows, length] int64: the beams.
        """

    def finish(self, input_ids: Tensor) -> SearchResult:
        """Return the result; input_ids are the beams, [rows, length], after the last step."""


def run_search(model: StepwiseModel, search: Search, input_ids: Tensor) -> Tensor:
    """Run the model and the search in turns until the search has finished.

    Returns the beams after the last step, [rows, length], for ``search.finish``.

    Parameters
    ----------
    model, search
        The model, and the search that chooses tokens.
    input_ids
        [rows, S] int64: the prompts, once for each beam.
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
