"""Logits processors as the token rules of ``Decoding``."""

from __future__ import annotations

from typing import NoReturn

from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
)

from lmdecode.beam.token_rules import TokenRules
from lmdecode.beam.trie import Trie
from lmdecode.integrations.transformers.beam.fused_processors import FusedProcessors

__all__ = [
    "looks_back",
    "raise_for_processors",
    "token_rules_of_processors",
    "trie_of_processors",
]


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
    forcing = [
        processor
        for processor in processors
        if type(processor) in (ForcedBOSTokenLogitsProcessor, ForcedEOSTokenLogitsProcessor)
    ]
    for processor, token in zip(forcing, rules.forced[0, :, 1].tolist(), strict=True):
        if not 0 <= token < vocab_size:
            is_bos = type(processor) is ForcedBOSTokenLogitsProcessor
            name = "forced_bos_token_id" if is_bos else "forced_eos_token_id"
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
