"""Logits processors as token rules, and as arguments of the ops of beam search."""

from __future__ import annotations

import math
from operator import is_
from typing import Any, NoReturn

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
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from lmdecode.beam.rule_arguments import RuleArguments
from lmdecode.beam.token_rules import ALWAYS, TokenRules, one_slot
from lmdecode.beam.trie import Trie
from lmdecode.integrations.transformers.beam.diversity import HammingDiversityLogitsProcessor
from lmdecode.integrations.transformers.generate_call import prefix_tokens_of

# Processors that compute, in the op's order. The others allow a token or set it to -inf, so their
# order has no effect, except for forced tokens.
_COMPUTING = (
    SequenceBiasLogitsProcessor,
    HammingDiversityLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
_FORCING = {
    ForcedBOSTokenLogitsProcessor: "forced_bos_token_id",
    ForcedEOSTokenLogitsProcessor: "forced_eos_token_id",
}
_BANNING = (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)


def _is_expressible(processor: Any) -> bool:
    """Tell whether the op can express a processor of a known class."""
    if isinstance(processor, SequenceBiasLogitsProcessor):
        biases = processor.sequence_bias.items()
        return all(len(tokens) == 1 and bias < math.inf for tokens, bias in biases)
    if type(processor) is ForcedEOSTokenLogitsProcessor:
        return processor.eos_token_id.numel() == 1
    if isinstance(processor, WhisperTimeStampLogitsProcessor):
        first, end = processor.timestamp_begin, processor.eos_token_id
        return (
            bool(getattr(processor, "_detect_timestamp_from_logprob", False))
            and isinstance(end, int)
            and 0 <= end < first
            and (processor.max_initial_timestamp_index or 0) >= 0
        )
    return True


def _is_in_order(processors: LogitsProcessorList, has_timestamps: bool) -> bool:
    """Tell whether the op, in its own order, has the result of these processors."""
    computed, forced, ngrams, tries = -1, False, False, False
    for place, processor in enumerate(processors):
        kind = type(processor)  # only the classes themselves: a subclass may do anything
        if kind is WhisperTimeStampLogitsProcessor:
            # It reads the result of all others, so it is the last one.
            if not has_timestamps or forced or place + 1 < len(processors):
                return False
        elif kind in _COMPUTING:
            number = _COMPUTING.index(kind)
            if forced or number <= computed:
                return False
            computed = number
        elif kind is NoRepeatNGramLogitsProcessor:
            if forced or ngrams:
                return False
            ngrams = True
        elif kind is PrefixConstrainedLogitsProcessor:
            if forced or tries or prefix_tokens_of(processor) is None:
                return False
            tries = True
        elif kind in _FORCING:
            forced = True
        elif kind not in _BANNING:
            return False
        if not _is_expressible(processor):
            return False
    return True


class FusedProcessors:
    """A list of processors as token rules, and as arguments of ``log_softmax_top_k``.

    ``processors`` are as ``generate()`` prepares them. With ``has_timestamps`` the rules support
    Whisper's timestamps, which the op does not. ``is_fused``: rules express the whole list;
    otherwise every processor is called. ``prefix_tokens`` is the trie of the list; it is no token
    rule, and the caller passes it to the op beside ``arguments`` or ``token_rules``.
    ``ignores_prompt``: the repetition penalty skips a part of the prompts. Rules look back at all
    tokens of their input, so ``arguments`` leaves that part out.
    """

    def __init__(self, processors: LogitsProcessorList, *, has_timestamps: bool = False) -> None:
        # Another class of list may do more when it is called.
        self.is_fused = type(processors) is LogitsProcessorList and _is_in_order(
            processors, has_timestamps
        )
        found = [prefix_tokens_of(processor) for processor in processors]
        self.prefix_tokens = next((one for one in found if one is not None), None)
        self._ignored: int | Tensor = 0
        self._processors = processors
        self._settings: list[Any] = []
        self._contents: list[Any] = []
        self._arguments: RuleArguments | None = None
        kinds = {type(processor) for processor in processors}
        for processor in processors if self.is_fused else ():
            if type(processor) is RepetitionPenaltyLogitsProcessor:
                ignored = processor.prompt_ignore_length
                if isinstance(ignored, int) or (ignored is not None and bool(ignored.any())):
                    self._ignored = ignored
                    # The op has one history for both: n-grams count the padding too.
                    self.is_fused = NoRepeatNGramLogitsProcessor not in kinds
        self.ignores_prompt = isinstance(self._ignored, Tensor) or self._ignored > 0

    def fits(self, vocab_size: int) -> bool:
        """Tell whether the op has the processors' result for [rows, vocab_size] logits.

        A processor with tokens beyond the vocabulary raises its own error when it is called.
        """
        if not self.is_fused:
            return False
        tokens = [
            token
            for processor in self._processors
            if isinstance(processor, SequenceBiasLogitsProcessor)
            for tokens in processor.sequence_bias
            for token in tokens
        ]
        tokens += [
            processor.timestamp_begin
            for processor in self._processors
            if isinstance(processor, WhisperTimeStampLogitsProcessor)
        ]
        return all(token < vocab_size for token in tokens)

    def token_rules(self, vocab_size: int, device: torch.device | None = None) -> TokenRules:
        """Return the rules of one slot, for a list that ``fits``; the bias is on ``device``."""
        rules: dict[str, Any] = {"bans": [], "forced": []}
        for processor in self._processors:
            kind = type(processor)
            if kind is SequenceBiasLogitsProcessor:
                values = processor.sequence_bias
                bias = torch.zeros(vocab_size, dtype=torch.float32, device="cpu")
                bias[[tokens[0] for tokens in values]] = torch.tensor(
                    list(values.values()), dtype=torch.float32, device="cpu"
                )
                rules["bias"] = bias.to(device)
            elif kind is HammingDiversityLogitsProcessor:
                rules["diversity_penalty"] = processor.diversity_penalty
            elif kind is RepetitionPenaltyLogitsProcessor:
                rules["repetition_penalty"] = float(processor.penalty)
            elif kind is NoRepeatNGramLogitsProcessor:
                rules["no_repeat_ngram_size"] = int(processor.ngram_size)
            elif kind is ForcedBOSTokenLogitsProcessor:
                rules["forced"].append((1, int(processor.bos_token_id)))
            elif kind is ForcedEOSTokenLogitsProcessor:
                rules["forced"].append((processor.max_length - 1, int(processor.eos_token_id)))
            elif kind is PrefixConstrainedLogitsProcessor:
                continue
            elif kind is WhisperTimeStampLogitsProcessor:
                rules["timestamps"] = _timestamps(processor, vocab_size)
            else:
                # Forced tokens override the bans before them.
                after_forcing = int(bool(rules["forced"]))
                banned, first, last = _banned(processor)
                rules["bans"] += [(token, first, last, after_forcing) for token in banned]
        return one_slot(**rules)

    def arguments(
        self, input_ids: Tensor, vocab_size: int, earlier_tokens: Tensor | None = None
    ) -> dict[str, Any]:
        """Return the op's keyword arguments for one step.

        ``input_ids`` are the beams, [rows, length] int64; ``vocab_size`` is the same in each step;
        ``earlier_tokens``, [requests, n] int64, were chosen by earlier groups in this step.
        """
        if not self._processors:
            return {}
        # Processors may be changed between steps, as by Whisper.
        settings = [value for processor in self._processors for value in vars(processor).values()]
        contents = [_content(value) for value in settings if isinstance(value, Tensor)]
        if self._arguments is None or not (
            len(settings) == len(self._settings)
            and all(map(is_, settings, self._settings))
            and contents == self._contents
        ):
            self._arguments = RuleArguments(self.token_rules(vocab_size, input_ids.device))
            self._settings, self._contents = settings, contents
        history = self._counted_tokens(input_ids) if self._arguments.looks_back else input_ids
        return self._arguments.of_length(input_ids.shape[1], history, earlier_tokens)

    def _counted_tokens(self, input_ids: Tensor) -> Tensor:
        """Return the beams, with -1 at positions that the repetition penalty ignores."""
        ignored = self._ignored
        if isinstance(ignored, int):
            return input_ids[:, ignored:]
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return input_ids.masked_fill(positions < ignored.to(input_ids.device)[:, None], -1)


def _content(tensor: Tensor) -> Any:
    """Return a value that changes with each in-place write: the version, or the elements.

    Inference tensors have no version counter.
    """
    return tensor.tolist() if tensor.is_inference() else tensor._version


def _timestamps(processor: Any, vocab_size: int) -> tuple[int, int, int, int]:
    """Return the timestamp rule of a processor."""
    first, last = processor.timestamp_begin, -1
    if processor.max_initial_timestamp_index is not None:
        last = min(first + processor.max_initial_timestamp_index, vocab_size - 1)
    return first, processor.eos_token_id, int(processor.begin_index), last


def _banned(processor: Any) -> tuple[list[int], int, int]:
    """Return the tokens that a processor bans, and the first and last length where it does."""
    kind = type(processor)
    if kind is NoBadWordsLogitsProcessor:
        return [tokens[0] for tokens in processor.sequence_bias], 0, ALWAYS
    if kind is SuppressTokensLogitsProcessor:
        return processor.suppress_tokens.reshape(-1).tolist(), 0, ALWAYS
    if kind is SuppressTokensAtBeginLogitsProcessor:
        begin = int(processor.begin_index)
        return processor.begin_suppress_tokens.reshape(-1).tolist(), begin, begin
    shortest = (
        processor.min_length
        if kind is MinLengthLogitsProcessor
        else processor.prompt_length_to_skip + processor.min_new_tokens
    )
    return processor.eos_token_id.reshape(-1).tolist(), 0, shortest - 1


# --- Rules of a search, or why there are none -----------------------------------------------------


def token_rules_of_processors(
    processors: LogitsProcessorList, vocab_size: int, *, has_timestamps: bool
) -> TokenRules | None:
    """Return the rules of one slot, or None if rules cannot express the processors.

    ``has_timestamps`` says whether the rules support Whisper's timestamps. Raises ValueError if a
    forced token is not in the vocabulary.
    """
    fused = FusedProcessors(processors, has_timestamps=has_timestamps)
    if not fused.fits(vocab_size) or fused.ignores_prompt:
        return None
    rules = fused.token_rules(vocab_size)
    names = [_FORCING[type(processor)] for processor in processors if type(processor) in _FORCING]
    for name, token in zip(names, rules.forced[0, :, 1].tolist(), strict=True):
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}: expected a token, 0 to {vocab_size - 1}, got {token}")
    return rules


def trie_of_processors(processors: LogitsProcessorList, vocab_size: int) -> Trie | None:
    """Return the trie of processors that rules can express, or None."""
    prefix_tokens = FusedProcessors(processors).prefix_tokens
    if prefix_tokens is None:
        return None
    prefix_tokens.trie.check_vocab("prefix_allowed_tokens_fn", vocab_size)
    return prefix_tokens.trie


def looks_back(rules: TokenRules) -> bool:
    """Tell whether rules depend on the tokens so far, including the prompts."""
    return bool((rules.repetition_penalty != 1).any() or rules.no_repeat_ngram_size.any())


def raise_for_processors(
    processors: LogitsProcessorList, vocab_size: int, greedy: bool
) -> NoReturn:
    """Raise a ValueError with the reason why rules cannot express the processors."""
    if type(processors) is not LogitsProcessorList:
        raise ValueError(
            f"logits_processor: expected a LogitsProcessorList, got {type(processors).__name__}"
        )
    for processor in processors:
        fused = FusedProcessors(LogitsProcessorList([processor]))
        if not fused.fits(vocab_size):
            instead = "model.generate()"
            if not greedy:
                instead += (
                    ", also with custom_generate=beam_search of lmdecode.integrations.transformers"
                )
            raise ValueError(
                f"logits_processor: {type(processor).__name__} is nothing that Decoding can do "
                f"with these arguments; any processor is called by {instead}"
            )
        if fused.ignores_prompt:
            raise ValueError(
                "logits_processor: expected a RepetitionPenaltyLogitsProcessor that ignores no "
                f"prompt, got prompt_ignore_length={processor.prompt_ignore_length}"
            )
    names = ", ".join(type(processor).__name__ for processor in processors)
    raise ValueError(f"logits_processor: expected them in the order of generate(), got {names}")
