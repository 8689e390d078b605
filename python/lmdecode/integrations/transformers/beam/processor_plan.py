"""Which logits processors become arguments of ``log_softmax_top_k``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from lmdecode.integrations.transformers.beam.diversity import HammingDiversityLogitsProcessor

# Those that compute, in the order of the op. The others allow a token or give it -inf, so their
# order is of no account, but for what is forced.
_COMPUTING = (
    SequenceBiasLogitsProcessor,
    HammingDiversityLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
_FORCING = (ForcedBOSTokenLogitsProcessor, ForcedEOSTokenLogitsProcessor)
_BANNING = (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)


def _is_expressible(processor: Any) -> bool:
    """Tell whether the op can do what a processor of a known class does."""
    if isinstance(processor, SequenceBiasLogitsProcessor):
        biases = processor.sequence_bias.items()
        return all(len(tokens) == 1 and bias < math.inf for tokens, bias in biases)
    if type(processor) is ForcedEOSTokenLogitsProcessor:
        return processor.eos_token_id.numel() == 1
    return True


def _is_in_order(processors: LogitsProcessorList) -> bool:
    """Tell whether the op's order gives what these give one after the other."""
    computed, forced, ngrams = -1, False, False
    for processor in processors:
        kind = type(processor)  # only the classes themselves: a subclass may do anything
        if kind in _COMPUTING:
            number = _COMPUTING.index(kind)
            if forced or number <= computed:
                return False
            computed = number
        elif kind is NoRepeatNGramLogitsProcessor:
            if forced or ngrams:
                return False
            ngrams = True
        elif kind in _FORCING:
            forced = True
        elif kind not in _BANNING:
            return False
        if not _is_expressible(processor):
            return False
    return True


class ProcessorPlan:
    """A list of processors as arguments of ``log_softmax_top_k``.

    Attributes
    ----------
    is_fused : bool
        Whether the op can do all that the list does. If not, every processor is called.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        # Another class of list may do more when it is called.
        self.is_fused = type(processors) is LogitsProcessorList and _is_in_order(processors)
        self._processors = processors
        self._ignored: int | Tensor = 0
        self._bias: Tensor | None = None
        kinds = {type(processor) for processor in processors}
        for processor in processors if self.is_fused else ():
            if type(processor) is RepetitionPenaltyLogitsProcessor:
                ignored = processor.prompt_ignore_length
                if isinstance(ignored, int) or (ignored is not None and bool(ignored.any())):
                    self._ignored = ignored
                    # The op has one history for both: n-grams count the padding too.
                    self.is_fused = NoRepeatNGramLogitsProcessor not in kinds

    def fits(self, vocab_size: int) -> bool:
        """Tell whether the op's result is that of the processors for [rows, vocab_size] logits.

        One that names tokens beyond the vocabulary raises an error of its own when it is called.
        """
        return self.is_fused and all(
            token < vocab_size
            for processor in self._processors
            if isinstance(processor, SequenceBiasLogitsProcessor)
            for tokens in processor.sequence_bias
            for token in tokens
        )

    def arguments(
        self, input_ids: Tensor, vocab_size: int, earlier_tokens: Tensor | None = None
    ) -> dict[str, Any]:
        """Return the op's keyword arguments for one step.

        Parameters
        ----------
        input_ids
            [rows, length] int64: the beams.
        vocab_size
            Of the logits.
        earlier_tokens
            [requests, n] int64: what the request's earlier groups have chosen in this step.
        """
        found: dict[str, Any] = {}
        forced: int | None = None
        banned: tuple[list[Tensor], list[Tensor]] = ([], [])  # before a token is forced, and after
        after_forcing = False
        for processor in self._processors:
            kind = type(processor)
            if kind is SequenceBiasLogitsProcessor:
                found["bias"] = self._bias_of(processor, vocab_size, input_ids.device)
            elif kind is HammingDiversityLogitsProcessor:
                if earlier_tokens is not None and earlier_tokens.shape[1]:
                    found["diversity_tokens"] = earlier_tokens
                    found["diversity_penalty"] = processor.diversity_penalty
            elif kind is RepetitionPenaltyLogitsProcessor:
                found["repetition_penalty"] = float(processor.penalty)
                found["sequences"] = self._counted_tokens(input_ids)
            elif kind is NoRepeatNGramLogitsProcessor:
                found["no_repeat_ngram_size"] = processor.ngram_size
                found["sequences"] = self._counted_tokens(input_ids)
            elif kind in _FORCING:
                after_forcing = True
                token = _forced_token(processor, input_ids.shape[1])
                forced = forced if token is None else token
            else:
                tokens = _banned_tokens(processor, input_ids.shape[1])
                if tokens is not None:
                    banned[after_forcing].append(tokens.to(input_ids.device))
        if forced is not None:
            # It overrules what is banned before, so only what comes after is left.
            requests_or_rows = input_ids.shape[0]
            return {"forced_tokens": input_ids.new_full((requests_or_rows,), forced)} | (
                {"suppressed_tokens": torch.cat(banned[1])} if banned[1] else {}
            )
        if banned[0] or banned[1]:
            found["suppressed_tokens"] = torch.cat(banned[0] + banned[1])
        return found

    def _counted_tokens(self, input_ids: Tensor) -> Tensor:
        """Return the beams, -1 where the repetition penalty is not to look."""
        if isinstance(self._ignored, int):
            return input_ids[:, self._ignored :]
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        ignored = positions < self._ignored.to(input_ids.device)[:, None]
        return input_ids.masked_fill(ignored, -1)

    def _bias_of(
        self, processor: SequenceBiasLogitsProcessor, vocab_size: int, device: torch.device
    ) -> Tensor:
        """Return [vocab_size] float32."""
        if self._bias is None or len(self._bias) != vocab_size or self._bias.device != device:
            self._bias = torch.zeros(vocab_size, device=device)
            tokens = [ids[0] for ids in processor.sequence_bias]
            self._bias[tokens] = torch.tensor(
                list(processor.sequence_bias.values()), dtype=torch.float32, device=device
            )
        return self._bias


def _forced_token(processor: Any, length: int) -> int | None:
    if type(processor) is ForcedBOSTokenLogitsProcessor:
        return processor.bos_token_id if length == 1 else None
    return int(processor.eos_token_id) if length == processor.max_length - 1 else None


def _banned_tokens(processor: Any, length: int) -> Tensor | None:
    """Return the tokens, [n] int64, that a processor bans for sequences of this length."""
    kind = type(processor)
    if kind is NoBadWordsLogitsProcessor:
        return torch.tensor([ids[0] for ids in processor.sequence_bias])
    if kind is SuppressTokensLogitsProcessor:
        return processor.suppress_tokens
    if kind is SuppressTokensAtBeginLogitsProcessor:
        return processor.begin_suppress_tokens if length == processor.begin_index else None
    shortest = (
        processor.min_length
        if kind is MinLengthLogitsProcessor
        else processor.prompt_length_to_skip + processor.min_new_tokens
    )
    return processor.eos_token_id.reshape(-1) if length < shortest else None
