"""The tensors of a batch of decoder searches: caches, rules for tokens, scratch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode._ops import ops
from lmdecode.beam.state import RULES, BeamParameters, BeamState, Rules
from lmdecode.decoder.config import DecoderConfig
from lmdecode.decoder.weights import PackedDecoder

__all__ = ["DecodingCaches", "DecodingSearches", "TokenRules", "new_caches", "new_token_rules"]

BLOCK = 16  # floats: heads and sources are padded to it
ALWAYS = (1 << 62) - 1  # a length that no sequence has


class TokenRules(NamedTuple):
    """What is done to log-probabilities before tokens are chosen, slot by slot.

    Without beams it is done to the logits, as in transformers.

    Attributes
    ----------
    repetition_penalty : Tensor
        [slots] float32 > 0; 1 is off.
    no_repeat_ngram_size : Tensor
        [slots] int64; 0 is off.
    diversity_penalty : Tensor
        [slots] float32, for each time that an earlier group of the request chose the token.
    bans : Tensor
        [slots, n, 4] int64: a token (-1: none), the first and the last length of a sequence that it
        cannot be added to, and 1 where that also holds for a forced token.
    forced : Tensor
        [slots, n, 2] int64: a length (-1: none), and the token that follows there.
    bias : Tensor
        [V] float32, added to all rows, or empty.
    """

    repetition_penalty: Tensor
    no_repeat_ngram_size: Tensor
    diversity_penalty: Tensor
    bans: Tensor
    forced: Tensor
    bias: Tensor


class DecodingCaches(NamedTuple):
    """Keys and values, which stay where they were written.

    ``rows`` are the slots' beams, heads are padded to a multiple of 16 floats.

    Attributes
    ----------
    self_keys, self_values : Tensor
        [layers, rows, heads, capacity, padded head] float32.
    cross_keys : Tensor
        [layers, requests, heads, padded head, source] float32: the source runs along memory.
    cross_values : Tensor
        [layers, requests, heads, source, padded head] float32.
    memory_lengths : Tensor
        [requests] int64.
    table : Tensor
        [rows, capacity] int32: the row of ``self_keys`` that holds each position of a beam.
    cached_lengths : Tensor
        [requests] int64: positions whose keys have been written.
    """

    self_keys: Tensor
    self_values: Tensor
    cross_keys: Tensor
    cross_values: Tensor
    memory_lengths: Tensor
    table: Tensor
    cached_lengths: Tensor


def padded(size: int) -> int:
    """Return the next multiple of the block."""
    return -(-size // BLOCK) * BLOCK


def new_token_rules(slots: int, num_bans: int = 0, num_forced: int = 0) -> TokenRules:
    """Return rules that do nothing."""
    with torch.inference_mode(False):
        return TokenRules(
            torch.ones(slots),
            torch.zeros(slots, dtype=torch.int64),
            torch.zeros(slots),
            torch.full((slots, num_bans, 4), -1, dtype=torch.int64),
            torch.full((slots, num_forced, 2), -1, dtype=torch.int64),
            torch.empty(0),
        )


def _cache_shapes(
    config: DecoderConfig, requests: int, rows: int, capacity: int, source: int
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of keys and values: of the sequences, and of the memories."""
    head, source = padded(config.head_size), padded(source)
    layers, heads = config.num_layers, config.num_heads
    of_rows = (layers, rows, heads, capacity, head)
    return (
        of_rows,
        of_rows,
        (layers, requests, heads, head, source),
        (layers, requests, heads, source, head),
    )


def new_caches(
    config: DecoderConfig,
    requests: int,
    rows: int,
    capacity: int,
    source: int,
    memory: Tensor | None = None,
) -> DecodingCaches:
    """Return caches in which nothing has been written, lengths 0.

    Parameters
    ----------
    config, requests, rows, capacity, source
        Sizes; see ``DecodingCaches``.
    memory : Tensor, optional
        ``caches_bytes`` of uint8 for keys and values to lie in.
    """
    shapes = _cache_shapes(config, requests, rows, capacity, source)
    with torch.inference_mode(False):
        if memory is None:
            parts = [torch.empty(shape) for shape in shapes]
        else:
            sizes = [math.prod(shape) for shape in shapes]
            flat = memory[: 4 * sum(sizes)].view(torch.float32).split(sizes)
            parts = [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]
        self_keys, self_values, cross_keys, cross_values = parts
        return DecodingCaches(
            self_keys,
            self_values,
            cross_keys,
            cross_values,
            torch.zeros(requests, dtype=torch.int64),
            torch.zeros(rows, capacity, dtype=torch.int32),
            torch.zeros(requests, dtype=torch.int64),
        )


def caches_bytes(
    config: DecoderConfig, requests: int, rows: int, capacity: int, source: int
) -> int:
    """Return how much memory keys and values take: a multiple of 64."""
    return 4 * sum(map(math.prod, _cache_shapes(config, requests, rows, capacity, source)))


class DecodingSearches:
    """Searches of a decoder, and everything that they need.

    Attributes
    ----------
    state, parameters
        See ``lmdecode.beam.state``; slot ``r * num_groups + g`` is group g of request r.
    token_rules, caches
        See there.
    """

    def __init__(
        self,
        decoder: PackedDecoder,
        state: BeamState,
        parameters: BeamParameters,
        token_rules: TokenRules,
        source: int,
        *,
        num_groups: int = 1,
        num_candidates: int,
        rules: Rules = "generate",
        greedy: bool = False,
        caches: DecodingCaches | None = None,
    ) -> None:
        slots, beams, capacity = state.sequences.shape
        self.decoder, self.state, self.parameters = decoder, state, parameters
        self.token_rules = token_rules
        self._options = [RULES[rules], int(greedy), num_groups, num_candidates]
        workspace_size = ops.decoding_workspace_bytes(
            decoder.sizes,
            decoder.numbers,
            [slots, beams, capacity, num_groups, num_candidates, token_rules.bans.shape[1]],
        )
        sizes = (slots // num_groups, slots * beams, capacity, source)
        caches_size = 0 if caches is not None else caches_bytes(decoder.config, *sizes)
        self._memory = decoder.spare_memory.take(caches_size + workspace_size)
        if caches is None:
            caches = new_caches(decoder.config, *sizes, self._memory)
        self.caches = caches
        self._workspace = self._memory[caches_size : caches_size + workspace_size]

    def read_memory(self, memory: Tensor, lengths: Tensor, requests: Tensor) -> None:
        """Compute the keys and values of memories.

        Parameters
        ----------
        memory : Tensor
            [n, source, memory_size] float32.
        lengths, requests : Tensor
            [n] int64: how much of each counts, and whose it is.
        """
        ops.decoding_read_memory_(
            self.decoder.layer_tensors,
            self.decoder.sizes,
            self.decoder.numbers,
            list(self.caches),
            memory.contiguous(),
            lengths,
            requests,
        )

    def run(
        self,
        max_steps: int = (1 << 62),
        *,
        stop_when_done: bool = False,
        logits: Tensor | None = None,
    ) -> int:
        """Do steps until all searches have ended, or one has; return how many.

        Parameters
        ----------
        logits : Tensor, optional
            [rows of the caches, V] float32: the last ones of each row are written to it.
        """
        return self._run([max_steps, int(stop_when_done), 1], logits)

    def read_tokens(self) -> Tensor:
        """Read the last token of every beam of the searches that go on, and choose none.

        Returns
        -------
        Tensor
            [rows of the caches, V] float32: the logits, 0 in rows that are not read.
        """
        rows = self.caches.table.shape[0]
        logits = torch.zeros(rows, self.decoder.config.vocab_size)
        self._run([1, 0, 0], logits)
        return logits

    def _run(self, options: list[int], logits: Tensor | None) -> int:
        steps = ops.decoding_steps_(
            self.decoder.tensors,
            self.decoder.sizes,
            self.decoder.numbers,
            list(self.state),
            list(self.parameters),
            list(self.token_rules),
            list(self.caches),
            self._workspace,
            [*self._options, *options],
            logits,
        )
        return int(steps)

    def release(self) -> None:
        """Leave the memory to searches to come; these, and their caches, are used no more."""
        self.decoder.spare_memory.give(self._memory)
