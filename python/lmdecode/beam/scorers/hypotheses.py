"""The finished hypotheses of one beam search, as transformers 4.38.2 keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lmdecode.beam.types import NO_WORST_SCORE

__all__ = ["BeamHypotheses", "Hypothesis"]

# Score, tokens [length] without the end token, and the beams they came from where that is known.
Hypothesis = tuple[float, Tensor, Any]


class BeamHypotheses:
    """The best ``num_beams`` finished hypotheses of one search.

    A hypothesis scores ``sum_logprobs / length ** length_penalty``, in float64. When the places are
    taken, a new one must be better than the worst, which goes then: of equal scores the one that
    came first.

    Parameters
    ----------
    num_beams : int
        Hypotheses that are kept.
    length_penalty : float
        Above 0 long hypotheses gain, below 0 short ones.
    early_stopping : bool or str
        When the search is done, once it has ``num_beams`` hypotheses: at once (True), when the best
        running beam, ended now, would be no better than the worst hypothesis (False), or when it
        can no longer become better at any length ("never", or anything else).
    max_length : int, optional
        The longest sequence, prompt included; needed where ``early_stopping`` is not a bool.

    Attributes
    ----------
    beams : list of (float, Tensor, object)
        Score, tokens and beam indices of each hypothesis, in the order they came.
    worst_score : float
        The lowest score; 1e9 while there are none.

    Raises
    ------
    ValueError
        If ``early_stopping`` is not a bool and there is no ``max_length``.
    """

    beams: list[Hypothesis]
    worst_score: float

    def __init__(
        self,
        num_beams: int,
        length_penalty: float,
        early_stopping: bool | str,
        max_length: int | None = None,
    ) -> None:
        if not isinstance(early_stopping, bool) and max_length is None:
            raise ValueError(
                f"early_stopping is {early_stopping!r} and max_length is None; expected a "
                "max_length, which early_stopping needs unless it is True or False"
            )
        self.num_beams = num_beams
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.max_length = max_length
        self._clear()

    def _clear(self) -> None:
        self.beams = []
        self.worst_score = NO_WORST_SCORE

    def __len__(self) -> int:
        """Return the number of hypotheses."""
        return len(self.beams)

    def add(
        self,
        hyp: Tensor,
        sum_logprobs: float,
        beam_indices: Sequence[Any] | Tensor | None = None,
        generated_len: int | None = None,
    ) -> None:
        """Offer a hypothesis.

        Parameters
        ----------
        hyp : Tensor
            [length], its tokens.
        sum_logprobs : float
            The sum of their log-probabilities.
        beam_indices : sequence or Tensor, optional
            The beams that the tokens came from.
        generated_len : int, optional
            Tokens that count for the length penalty; all of ``hyp`` by default.
        """
        length = hyp.shape[-1] if generated_len is None else generated_len
        score = sum_logprobs / length**self.length_penalty
        if len(self) < self.num_beams or score > self.worst_score:
            self._store(score, hyp, beam_indices)

    def _store(self, score: float, hyp: Tensor, beam_indices: Any) -> None:
        """Take a hypothesis that is good enough."""
        self.beams.append((score, hyp, beam_indices))
        if len(self.beams) > self.num_beams:
            del self.beams[min(range(len(self.beams)), key=lambda place: self.beams[place][0])]
            self.worst_score = min(hypothesis[0] for hypothesis in self.beams)
        else:
            self.worst_score = min(score, self.worst_score)

    def is_done(
        self, best_sum_logprobs: float, cur_len: int, decoder_prompt_len: int | None = 0
    ) -> bool:
        """Tell whether no running beam is expected to become a better hypothesis.

        Parameters
        ----------
        best_sum_logprobs : float
            The best running beam's sum of log-probabilities.
        cur_len : int
            Its length, prompt included.
        decoder_prompt_len : int
            Tokens that do not count for the length penalty.

        Raises
        ------
        ValueError
            If the length at ``max_length`` is needed and that is within the prompt.
        """
        if len(self) < self.num_beams:
            return False
        if self.early_stopping is True:
            return True
        prompt_length = decoder_prompt_len or 0
        length = cur_len - prompt_length
        if self.early_stopping is not False and self.length_penalty > 0:
            # Scores are negative: the longer, the better.
            assert self.max_length is not None
            length = self.max_length - prompt_length
            if length <= 0:
                raise ValueError(
                    f"max_length is {self.max_length} and decoder_prompt_len {prompt_length}; "
                    "expected a max_length beyond the prompt"
                )
        return self.worst_score >= best_sum_logprobs / length**self.length_penalty
