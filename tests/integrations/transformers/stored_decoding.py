"""Models, stores and calls of the tests of ``Decoding.generate`` with a store."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lmdecode import Decoding
from lmdecode.store import KVStore
from tests.support.causal_models import random_model, random_tokens

# All layers full, all with a window, some of either; and positions in the embedding.
LLAMA, MISTRAL, GEMMA = ("llama", "plain"), ("mistral", "window"), ("gemma3_text", "plain")
# Layers with a state: short convolutions, and the gated delta rule and Mamba-2 with them.
LFM, QWEN = ("lfm2", "convolutions at the ends"), ("qwen3_5_text", "delta rule last, biases")
GRANITE = ("granitemoehybrid", "experts, multipliers")
FALCON = ("falcon_h1", "multipliers")  # with both in every layer
WITH_STATES = (LFM, QWEN, GRANITE, FALCON)
# Heads of two sizes; keys that layers share, and keys that are values.
SHARED = ("gemma4_text", "shared keys, inputs of layers")
TWO_SIZES = (SHARED, ("gemma4_text", "values are keys, biases, untied"))
MODELS = (LLAMA, MISTRAL, GEMMA, ("gemma2", "plain"), ("gpt2", "plain"), *TWO_SIZES, *WITH_STATES)
PROMPT = random_tokens(37)[None]
TURNS = [random_tokens(5, 1)[None], random_tokens(1, 2)[None], random_tokens(40, 3)[None]]


def decoding_of(case: tuple[str, str], dtype: str = "float32", **options: Any) -> Decoding:
    return Decoding.from_pretrained(random_model(*case), dtype, **options)


@contextmanager
def store_of(decoding: Decoding, folder: Path, **options: Any) -> Iterator[KVStore]:
    settings = {"chunk_tokens": 16, "capacity_bytes": 1 << 26, **options}
    if settings.get("readonly"):
        del settings["capacity_bytes"]
    with KVStore(folder, fingerprint=decoding.fingerprint(), **settings) as store:
        yield store


def answer(
    decoding: Decoding, ids: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [1, S] and logits of a call."""
    settings = {"max_new_tokens": 9, "min_new_tokens": 9, **options}
    result = decoding.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True,
        **settings,
    )  # fmt: skip
    return result.sequences, torch.cat(list(result.logits))


def same(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))
