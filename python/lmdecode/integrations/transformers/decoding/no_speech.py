"""Whisper's probability that there is no speech, without another forward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import WhisperNoSpeechDetection

from lmdecode.decoder.searches import DecodingSearches

__all__ = ["NoSpeech"]


class NoSpeech:
    """Computes the probabilities of ``WhisperNoSpeechDetection`` in the search that follows.

    transformers runs encoder and decoder again for them, if the prompt is longer than one token.
    The ``processor`` receives them. Prompts are [rows, length] int64, ``num_beams`` rows per audio.
    """

    def __init__(
        self, processor: WhisperNoSpeechDetection, input_ids: Tensor, num_beams: int
    ) -> None:
        self._processor: Any = processor
        self._num_beams = num_beams
        self._length = input_ids.shape[1]

    @staticmethod
    def take_from(
        processors: LogitsProcessorList, input_ids: Tensor, num_beams: int
    ) -> tuple[NoSpeech | None, LogitsProcessorList]:
        """Return the detection and the processors without it.

        The detection is None if it must see logits that earlier processors changed.
        """
        kinds = [type(processor) for processor in processors]
        if type(processors) is not LogitsProcessorList:
            return None, processors
        if kinds.count(WhisperNoSpeechDetection) != 1:
            return None, processors
        place = kinds.index(WhisperNoSpeechDetection)
        processor = processors[place]
        if processor.start_of_trans_offset <= 1 and place > 0:
            return None, processors
        left = LogitsProcessorList([*processors[:place], *processors[place + 1 :]])
        return NoSpeech(processor, input_ids, num_beams), left

    def read(self, searches: DecodingSearches) -> None:
        """Read the prompts as far as needed; the search continues from there."""
        processor = self._processor
        if self._length != processor.begin_index:
            return
        offset = processor.start_of_trans_offset
        if offset > 1:
            # Covers all audios, even if only some are retried at another temperature: transformers
            # then indexes all of them, too.
            if getattr(processor, "lmdecode_inputs", None) is processor.inputs:
                return
            processor.lmdecode_inputs = processor.inputs
            logits = _logits_at(searches, processor.begin_index - offset)[:: self._num_beams]
        else:
            logits = _logits_at(searches, self._length - 1)[:: self._num_beams]
            logits = logits.repeat_interleave(self._num_beams, dim=0)
        processor._no_speech_prob = logits.softmax(dim=-1)[:, processor.no_speech_token]


def _logits_at(searches: DecodingSearches, place: int) -> Tensor:
    """Return the decoder's logits after the token at ``place`` of the prompts, [rows, V]."""
    lengths, prompts = searches.state.lengths, searches.parameters.prompt_lengths
    before = lengths.clone(), prompts.clone()
    lengths.fill_(place + 1)
    prompts.fill_(place + 1)
    logits = searches.read_tokens()
    lengths.copy_(before[0])
    prompts.copy_(before[1])
    return logits
