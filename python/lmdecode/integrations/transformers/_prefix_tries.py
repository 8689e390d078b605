"""A ``Trie`` given to ``generate()`` as ``prefix_allowed_tokens_fn``."""

from __future__ import annotations

from transformers import LogitsProcessorList
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from lmdecode.beam.trie import PrefixTokens, Trie

__all__ = ["behind_prompt", "check_tries", "has_trie", "prefix_tokens_of", "refuse_trie"]


def prefix_tokens_of(processor: object) -> PrefixTokens | None:
    """Return the trie of a processor, and where its sequences begin; None for other processors."""
    if type(processor) is not PrefixConstrainedLogitsProcessor:
        return None
    allowed = processor._prefix_allowed_tokens_fn
    return allowed if isinstance(allowed, PrefixTokens) else None


def behind_prompt(processors: LogitsProcessorList, prompt_length: int) -> LogitsProcessorList:
    """Return the list with each ``Trie`` bound to the end of the prompt."""
    if type(processors) is not LogitsProcessorList:
        return processors
    bound = LogitsProcessorList()
    for processor in processors:
        if type(processor) is PrefixConstrainedLogitsProcessor:
            trie = processor._prefix_allowed_tokens_fn
            if isinstance(trie, Trie):
                processor = PrefixConstrainedLogitsProcessor(
                    PrefixTokens(trie, prompt_length), processor._num_beams
                )
        bound.append(processor)
    return bound


def check_tries(processors: LogitsProcessorList, vocab_size: int) -> None:
    """Raise ValueError for a trie with tokens that a vocabulary does not have."""
    for processor in processors:
        prefix_tokens = prefix_tokens_of(processor)
        if prefix_tokens is not None:
            prefix_tokens.trie.check_vocab("prefix_allowed_tokens_fn", vocab_size)


def has_trie(processors: LogitsProcessorList) -> bool:
    """Tell whether a trie constrains the sequences."""
    return any(prefix_tokens_of(processor) is not None for processor in processors)


def refuse_trie(processors: LogitsProcessorList, name: str, expected: str, given: object) -> None:
    """Raise ValueError for an option that searches with a trie do not support."""
    if has_trie(processors):
        raise ValueError(f"{name}: expected {expected} beside a Trie, got {given}")
