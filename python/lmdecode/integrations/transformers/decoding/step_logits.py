"""The scores and logits of each step that ``Decoding.generate`` is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmdecode.decoder.device_loop import DeviceSearches
from lmdecode.decoder.searches import DecodingSearches

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList

__all__ = ["StepLogits"]


class StepLogits:
    """What ``output_scores`` and ``output_logits`` ask for, collected over the steps.

    Parameters
    ----------
    config
        As ``generate()`` prepares it.
    processors
        What the scores have gone through; called here, each works on rows by themselves.
    prompts : Tensor
        [rows, length] int64: processors look at padding, too.
    is_kept
        Whether these searches can be asked for the logits of a step. None is kept otherwise.

    Attributes
    ----------
    scores : list of Tensor or None
        Of each step [rows, V] float32, as in transformers: greedily the processed logits, with
        beams the processed log-probabilities. 0 in rows of searches that had ended.
    logits : list of Tensor or None
        Likewise, as they come from the decoder.
    """

    def __init__(
        self,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        prompts: Tensor,
        *,
        is_kept: bool,
    ) -> None:
        is_kept = is_kept and bool(config.return_dict_in_generate)
        has_groups = (config.num_beam_groups or 1) > 1  # their diversity is no processor
        self.scores: list[Tensor] | None = None
        self.logits: list[Tensor] | None = None
        if is_kept and config.output_scores and not has_groups:
            self.scores = []
        if is_kept and config.output_logits:
            self.logits = []
        self._processors, self._greedy = processors, config.num_beams == 1
        self._prompts = prompts

    def run(self, searches: DecodingSearches | DeviceSearches) -> None:
        """Do steps until all searches have ended."""
        if isinstance(searches, DeviceSearches) or (self.scores is None and self.logits is None):
            searches.run()
            return
        state = searches.state
        slots, beams, capacity = state.sequences.shape
        vocab_size = searches.decoder.config.vocab_size
        while True:
            goes_on = (state.done == 0) & (state.status == 0) & (state.lengths < capacity)
            rows = goes_on.repeat_interleave(beams).nonzero()[:, 0]
            if not len(rows):
                return
            length = int(state.lengths[goes_on].max())
            sequences = state.sequences[:, :, :length].flatten(0, 1)[rows]
            sequences[:, : self._prompts.shape[1]] = self._prompts[rows]
            logits = torch.zeros(slots * beams, vocab_size)
            searches.run(1, logits=logits)
            if self.logits is not None:
                self.logits.append(logits)
            if self.scores is not None:
                self.scores.append(self._scores(logits, rows, sequences))

    def _scores(self, logits: Tensor, rows: Tensor, sequences: Any) -> Tensor:
        """Return [rows of logits, V]; rows, [n], are those of the sequences, [n, length]."""
        values = logits[rows]
        if not self._greedy:
            values = torch.log_softmax(values, dim=-1)
        return torch.zeros_like(logits).index_copy_(0, rows, self._processors(sequences, values))
