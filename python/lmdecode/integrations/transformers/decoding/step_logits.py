"""The scores and logits of each step, for ``Decoding.generate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmdecode.decoder.device_loop import DeviceSearches
from lmdecode.decoder.searches import DecodingSearches

if TYPE_CHECKING:
    from transformers import GenerationConfig

__all__ = ["StepLogits"]


class StepLogits:
    """Collects ``output_scores`` and ``output_logits`` over the steps.

    ``scores`` has, for each step, [rows, V] float32 as in transformers: processed logits in greedy
    search, processed log-probabilities with beams, and 0 in rows of ended searches. ``logits`` has
    the unprocessed logits of the decoder. Nothing is collected unless ``is_kept``.
    """

    def __init__(self, config: GenerationConfig, *, is_kept: bool) -> None:
        is_kept = is_kept and bool(config.return_dict_in_generate)
        has_groups = (config.num_beam_groups or 1) > 1  # their diversity penalty is not a processor
        self.scores: list[Tensor] | None = None
        self.logits: list[Tensor] | None = None
        if is_kept and config.output_scores and not has_groups:
            self.scores = []
        if is_kept and config.output_logits:
            self.logits = []

    def run(self, searches: DecodingSearches | DeviceSearches) -> None:
        """Do steps until all searches have ended."""
        if isinstance(searches, DeviceSearches) or (self.scores is None and self.logits is None):
            searches.run()
            return
        slots, beams, _ = searches.state.sequences.shape
        shape = (slots * beams, searches.decoder.config.vocab_size)
        shapes = shape if self.scores is None else (2, *shape)
        found = torch.zeros(shapes, dtype=torch.float32, device="cpu")
        while searches.run(1, logits=found):
            if self.logits is not None:
                self.logits.append((found if self.scores is None else found[0]).clone())
            if self.scores is not None:
                self.scores.append(found[1].clone())
            found.zero_()
