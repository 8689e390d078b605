"""Settings of all kinds of beam search, from ``generate()``'s configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmdecode.beam.state import (
    BeamParameters,
    BeamState,
    EarlyStopping,
    beam_parameters,
    new_beam_state,
)
from lmdecode.beam.types import (
    STATUS_CONTINUATIONS,
    STATUS_EMPTY,
    STATUS_NAN,
    STATUS_SCORE,
    UNUSED_BEAM_SCORE,
)
from lmdecode.integrations.transformers._status import raise_for_status

if TYPE_CHECKING:
    from transformers import GenerationConfig

_STATUS_TEXT = {
    STATUS_NAN: "NaN in its logits",
    STATUS_EMPTY: "no candidate above -inf",
    STATUS_SCORE: "a score of +inf or NaN",
    STATUS_CONTINUATIONS: "fewer candidates that go on than beams",
}


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search over ``batch`` prompts.

    ``num_beams`` and ``num_return_sequences`` count for each prompt. ``end_tokens`` may be empty;
    ``pad_token`` is the model's input for a beam that has ended, ``fill`` the token after the end
    of a result. ``length_penalty`` and ``early_stopping`` as in
    ``lmdecode.beam.state.BeamParameters``.
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
        """Return the settings of a call; input_ids is [batch * num_beams, prompt length]."""
        ends, pad = config._eos_token_tensor, config._pad_token_tensor
        end_tokens: list[int] = [] if ends is None else ends.reshape(-1).tolist()
        pad_token = 0 if pad is None else int(pad)
        # With beams transformers treats a pad token of 0 as none.
        fill = (pad_token or end_tokens[0]) if end_tokens else -1
        if config.num_beams == 1 and pad is not None:
            fill = pad_token
        early_stopping = config.early_stopping
        return cls(
            batch=input_ids.shape[0] // config.num_beams,
            num_beams=config.num_beams,
            num_return_sequences=config.num_return_sequences,
            prompt_length=input_ids.shape[1],
            max_length=config.max_length,
            end_tokens=end_tokens,
            pad_token=pad_token,
            fill=fill,
            length_penalty=config.length_penalty,
            early_stopping="never" if early_stopping == "never" else early_stopping is True,
        )

    @property
    def candidates_per_beam(self) -> int:
        """Number of candidates of a beam, of which at least one does not end."""
        return max(2, 1 + len(self.end_tokens))

    @property
    def not_an_end(self) -> int:
        """A token other than the end tokens."""
        return next(t for t in range(len(self.end_tokens) + 1) if t not in self.end_tokens)


def new_search(
    settings: SearchSettings,
    input_ids: Tensor,
    *,
    num_groups: int = 1,
    end_tokens: list[int],
    keep_beam_indices: bool,
) -> tuple[BeamParameters, BeamState]:
    """Return the parameters and initial state of a search, for ``beam_step``.

    Slot b * num_groups + g is group g of prompt b, so that rows are in the order of the beams of
    input_ids, [batch * num_beams, prompt length].
    """
    slots, width = settings.batch * num_groups, settings.num_beams // num_groups
    parameters = beam_parameters(
        slots,
        width,
        prompt_lengths=settings.prompt_length,
        max_lengths=settings.max_length,
        length_penalty=settings.length_penalty,
        early_stopping=settings.early_stopping,
        end_tokens=end_tokens,
        pad_tokens=settings.pad_token,
        device=input_ids.device,
    )
    state = new_beam_state(
        slots,
        width,
        settings.max_length,
        keep_beam_indices=keep_beam_indices,
        device=input_ids.device,
    )
    state.sequences[:, :, : settings.prompt_length] = input_ids.view(slots, width, -1)
    state.lengths.fill_(settings.prompt_length)
    state.scores[:, 1:] = UNUSED_BEAM_SCORE
    return parameters, state


def check_groups(config: GenerationConfig) -> int:
    """Return the number of groups; raise ValueError for inconsistent options."""
    groups, penalty = config.num_beam_groups or 1, config.diversity_penalty or 0.0
    if groups == 1:
        if penalty:
            raise ValueError("num_beam_groups: expected at least 2 with a diversity_penalty, got 1")
        return 1
    if groups < 1 or config.num_beams % groups:
        raise ValueError(
            f"num_beam_groups: expected a divisor of num_beams = {config.num_beams}, got {groups}"
        )
    if not penalty > 0:
        raise ValueError(
            "diversity_penalty: expected a number > 0, else all num_beam_groups would be the same, "
            f"got {penalty}"
        )
    if config.do_sample:
        raise ValueError("do_sample: expected False for groups of beams, got True")
    if config.guidance_scale is not None and config.guidance_scale != 1:
        raise ValueError(
            "guidance_scale: expected None, its processor would run the model once a group, "
            f"got {config.guidance_scale}"
        )
    return groups


def rows_of_beams(beams: Tensor, first_rows: Tensor) -> Tensor:
    """Return the rows of beams that are counted within a search; -1 stays."""
    return torch.where(beams < 0, beams, beams + first_rows.to(beams.dtype))


def raise_for_prompts(status: Tensor, step: int) -> None:
    """Raise RuntimeError; status, [batch] uint8, is not 0 for all."""
    raise_for_status(status.tolist(), step, noun="prompt", text=_STATUS_TEXT)
