"""Prompts of a decoder with different lengths: masked tokens are left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.state import BeamState

__all__ = ["leave_out", "prompt_padding"]

_PADDING = torch.iinfo(torch.int64).min  # kPadding of csrc/decoder/decoding.h


def prompt_padding(model: Any, model_kwargs: dict[str, Any], input_ids: Tensor) -> Tensor | None:
    """Return the mask of padding tokens, [rows, length] bool; None if there is no padding.

    Raises ValueError if the mask does not fit the prompts, or the model is not Whisper: only
    Whisper's positions do not count padding.
    """
    mask = model_kwargs.get("decoder_attention_mask")
    if mask is None or bool(mask.all()):
        return None
    name = "decoder_attention_mask"
    if model.config.model_type != "whisper":
        raise ValueError(f"{name}: expected ones, prompts of the decoder are not padded")
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"{name}: expected shape {list(input_ids.shape)}, that of the prompts, got "
            f"{list(mask.shape)}"
        )
    padding = mask.cpu() == 0
    if bool(padding[:, -1].any()):
        raise ValueError(f"{name}: expected 1 for the last token of each prompt, got 0")
    return padding


def leave_out(state: BeamState, padding: Tensor | None) -> None:
    """Remove padding from the prompts at the start of a search."""
    if padding is None:
        return
    slots, width, _ = state.sequences.shape
    prompts = state.sequences[:, :, : padding.shape[1]]
    padding = padding.view(slots, width, -1)
    # Attention skips it anywhere, and positions do not count it.
    order = torch.argsort((~padding).to(torch.uint8), dim=-1, stable=True)
    prompts.copy_(prompts.masked_fill(padding, _PADDING).gather(-1, order))
