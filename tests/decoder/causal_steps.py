"""Steps of decoder-only models on their caches, for the tests of these."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.models.configs import CausalConfig
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.weights import CausalWeights
from lmdecode.readers.transformers.causal_models import causal_model_of
from tests.support.causal_models import model_of, random_config, random_model

# Layers with a window and without, norms of heads, four norms a layer, both caps of Gemma 2, and
# sizes at which matrices are cut into parts for threads.
WIDE = {
    "vocab_size": 1501, "hidden_size": 96, "intermediate_size": 520, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 40, "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 4.0,
}  # fmt: skip


class Entry(NamedTuple):
    """Tokens of a sequence; logits of the last ``num_logits`` of them, of all by default."""

    sequence: int
    tokens: Tensor
    is_prompt: bool = True
    num_logits: int | None = None

    @property
    def logits(self) -> int:
        """Return of how many tokens logits are wanted."""
        return len(self.tokens) if self.num_logits is None else self.num_logits


@functools.cache
def parts(architecture: str, variant: str) -> tuple[CausalConfig, CausalWeights]:
    """Return what ``causal_logits`` takes of one of ``CASES``."""
    return causal_model_of(random_model(architecture, variant))


@functools.cache
def packed(architecture: str, variant: str, weight_format: str = "float32") -> PackedCausalModel:
    """Return the weights of one of ``CASES`` as the engine takes them."""
    return PackedCausalModel(*parts(architecture, variant), weight_format)


@functools.cache
def wide(weight_format: str = "float32") -> PackedCausalModel:
    """Return a model that threads share."""
    model = model_of(random_config("gemma2", "plain", **WIDE))
    return PackedCausalModel(*causal_model_of(model), weight_format)


def new_caches(
    model: PackedCausalModel, sequences: int = 1, max_length: int = 160, **options: Any
) -> CausalCaches:
    """Return caches in which there is nothing that a step may read before it has written it."""
    caches = CausalCaches(model, sequences, max_length, **options)
    for pool in caches._tensors[::6]:
        pool.view(torch.uint8).fill_(255)  # NaN, and scales of int8 that are
    caches._workspace.fill_(255)  # NaN, and as an integer -1
    return caches


def forward_arguments(caches: CausalCaches, *entries: Entry) -> list[Any]:
    """Return the arguments of ``causal_forward_`` for a step that reads entries."""
    table = [[e.sequence, len(e.tokens), int(e.is_prompt), e.logits] for e in entries]
    model = caches.model
    return [
        model.memory,
        caches._tensors,
        model.cache_windows,
        caches._workspace,
        torch.cat([entry.tokens for entry in entries]),
        torch.tensor(table),
        sum(entry.logits for entry in entries),
        model.config.vocab_size,
        caches.max_rows,
    ]


def step(caches: CausalCaches, *entries: Entry) -> list[Tensor]:
    """Read entries in one step; returns the logits of each."""
    *_, tokens, table, num_logits, _, _ = forward_arguments(caches, *entries)
    logits = caches.forward(tokens, table, num_logits)
    return list(logits.split([entry.logits for entry in entries]))


def prompt_logits(caches: CausalCaches, tokens: Tensor, *pieces: int) -> Tensor:
    """Read a prompt, in pieces of these lengths, as sequence 0; returns the logits of all."""
    split = tokens.split(list(pieces)) if pieces else (tokens,)
    return torch.cat([step(caches, Entry(0, piece))[0] for piece in split])


def generated_logits(caches: CausalCaches, tokens: Tensor, *pieces: int) -> Tensor:
    """Likewise, as tokens that were generated, one by one by default."""
    split = tokens.split(list(pieces) or 1)
    return torch.cat([step(caches, Entry(0, piece, False))[0] for piece in split])


def free_blocks(caches: CausalCaches) -> list[int]:
    """Return of each cache how many of its blocks are free."""
    return [int(counters[0]) for counters in caches._tensors[5::6]]


def state(caches: CausalCaches) -> list[Tensor]:
    """Return a copy of all that a step changes, as bytes."""
    return [tensor.view(torch.uint8).clone() for tensor in caches._tensors]
