"""Models and stores of the tests of ``generate_with_store``."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lmdecode.integrations.transformers import generate_with_store
from lmdecode.store import Fingerprint, KVStore
from tests.support.tiny_models import EOS, PAD, VOCAB, build_model, llama_like

SHIPPED = Path(__file__).resolve().parents[3] / "examples" / "kjv_mistral" / "model"
CHUNK = 16  # of the store's slots
# One of each kind of cache: full, sliding, mixed, and with an encoder.
DECODERS = ("gpt2", "llama", "mistral", "gemma2", "gemma3")
ENCODER_DECODERS = ("bart", "t5")


@functools.cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model with random weights."""
    if name not in ("gemma2", "gemma3"):
        return build_model(name, VOCAB, dtype)
    # Attention of three tokens, of all, and so on.
    pattern = {"sliding_window_pattern": 2} if name == "gemma3" else {}
    return llama_like(name.title(), num_hidden_layers=4, sliding_window=6, **pattern).to(dtype)


@functools.cache
def fingerprint_of(model: PreTrainedModel) -> Fingerprint:
    return Fingerprint.from_model(model)


@contextmanager
def store_of(model: PreTrainedModel, folder: Path, **options: Any) -> Iterator[KVStore]:
    settings = {"chunk_tokens": CHUNK, "capacity_bytes": 1 << 28, **options}
    if settings.get("readonly"):
        del settings["capacity_bytes"]
    with KVStore(folder, fingerprint=fingerprint_of(model), **settings) as store:
        yield store


def ids(length: int, seed: int = 0) -> torch.Tensor:
    """[1, length] without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(max(PAD, EOS) + 1, VOCAB, (1, length), generator=generator)


#: No end before the number of tokens: answers of the same length whatever the weights say.
ANSWER = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}


def answer(
    model: PreTrainedModel, store: KVStore, session: str, tokens: torch.Tensor, **options: Any
) -> tuple[list[int], torch.Tensor]:
    """Tokens and logits of a turn."""
    settings = {"prefill_chunk_size": 8, "commit_every": 4, **ANSWER, **options}
    result = generate_with_store(
        model, store, session, tokens, return_dict_in_generate=True, output_logits=True, **settings
    )
    return result.sequences[0].tolist(), torch.cat(list(result.logits))


def converse(
    model: PreTrainedModel, store: KVStore, session: str, turns: Sequence[torch.Tensor],
    said: Sequence[int] = (), **options: Any,
) -> tuple[list[int], list[torch.Tensor]]:  # fmt: skip
    """A conversation: each turn goes on where the last answer ended."""
    tokens, logits = list(said), []
    for turn in turns:
        tokens = [*tokens, *turn[0].tolist()]
        tokens, some = answer(model, store, session, torch.tensor([tokens]), **options)
        logits.append(some)
    return tokens, logits
