"""What every kind of beam search takes from ``generate()``'s configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lmdecode.beam_state import EarlyStopping
from lmdecode.integrations.transformers._beam_candidates import (
    STATUS_NAN,
    STATUS_NO_CANDIDATE,
    STATUS_SCORE,
)
from lmdecode.integrations.transformers._status import raise_for_status

if TYPE_CHECKING:
    from transformers import GenerationConfig

# The score of the beams that do not count at the beginning, when all are equal.
UNUSED = -1.0e9

_STATUS_TEXT = {
    STATUS_NAN: "NaN in its logits",
    STATUS_NO_CANDIDATE: "no candidate above -inf",
    STATUS_SCORE: "a score of +inf or NaN",
    8: "fewer candidates that go on than beams",
}


@dataclass(frozen=True)
class SearchSettings:
    """Numbers of a search.

    Attributes
    ----------
    batch, num_beams, num_return_sequences
        Prompts, beams of each, and results of each.
    prompt_length, max_length
        Tokens that sequences begin with, and have at most.
    end_tokens
        May be empty.
    pad_token
        What the model is given for a beam that has ended.
    fill
        What follows the end of a result.
    length_penalty, early_stopping
        See ``lmdecode.beam_state.BeamParameters``.
    """

    batch: int
    num_beams: int
    num_return_sequences: int
    prompt_length: int
    max_length: int
    end_tokens: list[int]
    pad_token: int
    fill: int
    length_penalty: float
    early_stopping: EarlyStopping

    @classmethod
    def of(cls, config: GenerationConfig, input_ids: Tensor) -> SearchSettings:
        """Read what ``generate()`` prepared; input_ids is [batch * num_beams, prompt length]."""
        end_tokens = config._eos_token_tensor
        end_tokens = [] if end_tokens is None else end_tokens.reshape(-1).tolist()
        pad_token = config._pad_token_tensor
        pad_token = 0 if pad_token is None else int(pad_token)
        early_stopping = config.early_stopping
        return cls(
            batch=input_ids.shape[0] // config.num_beams,
            num_beams=config.num_beams,
            num_return_sequences=config.num_return_sequences,
            prompt_length=input_ids.shape[1],
            max_length=config.max_length,
            end_tokens=end_tokens,
            pad_token=pad_token,
            # transformers takes a pad token of 0 for none.
            fill=(pad_token or end_tokens[0]) if end_tokens else -1,
            length_penalty=config.length_penalty,
            early_stopping="never" if early_stopping == "never" else early_stopping is True,
        )

    @property
    def candidates_per_beam(self) -> int:
        """Enough that one of them does not end."""
        return max(2, 1 + len(self.end_tokens))


def raise_for_prompts(status: Tensor, step: int) -> None:
    """Raise RuntimeError; status, [batch] uint8, is not 0 for all."""
    raise_for_status(status.tolist(), step, noun="prompt", text=_STATUS_TEXT)
