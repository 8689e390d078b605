"""Two conversations that take turns, and what runs them in the process that is killed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lmdecode.demo._model import load_model

# Who speaks when: what the reader says in each turn, after which the model goes on.
CONVERSATIONS = {
    "psalms": ("Psalms 23\nThe LORD is my", "\nPsalms 24\nThe earth is"),
    "genesis": ("Genesis 1\nIn the beginning", "\nGenesis 2\nThus the heavens"),
}
SEED = 2024
CAPACITY_BYTES = 1 << 28
# Each process is a fork of one that has imported transformers, once for all of them.
PROCESSES = multiprocessing.get_context("forkserver")
_IMPORTED = [__name__, "lmdecode.store", "transformers.models.mistral.modeling_mistral"]


def prepare_processes() -> None:
    """Let these imports begin, which take seconds, beside what this process does next."""
    PROCESSES.set_forkserver_preload(_IMPORTED)
    forkserver.ensure_running()


class Words:
    """A streamer that tells of each token of an answer."""

    def __init__(self, on_token: Callable[[], object]) -> None:
        self._on_token = on_token
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then tokens."""
        if not self._is_prompt:
            self._on_token()
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is left."""


def talk(
    model: Any,
    tokenizer: Any,
    folder: Path,
    num_tokens: int,
    on_event: Callable[..., object] = lambda kind, **details: None,
) -> dict[str, list[int]]:
    """Hold both conversations, from wherever the store has them, and return their tokens.

    Answers have ``num_tokens`` tokens, so that the number of tokens tells where a conversation is.
    """
    from lmdecode.integrations.transformers import generate_with_store, sample
    from lmdecode.store import Fingerprint, KVStore

    fingerprint = Fingerprint.from_model(model, tokenizer)
    with KVStore(folder, fingerprint=fingerprint, capacity_bytes=CAPACITY_BYTES) as store:
        said: dict[str, Sequence[int]] = {
            name: store.session(name).tokens for name in CONVERSATIONS
        }
        on_event("found", tokens={name: len(tokens) for name, tokens in said.items()})
        ends = dict.fromkeys(CONVERSATIONS, 0)
        for turn in range(2):
            for name, lines in CONVERSATIONS.items():
                line = tokenizer(lines[turn], add_special_tokens=turn == 0).input_ids
                start, ends[name] = ends[name], ends[name] + len(line) + num_tokens
                tokens = said[name]
                if len(tokens) >= ends[name]:
                    continue  # it was said before the process ended
                if len(tokens) <= start:
                    tokens = [*tokens, *line]
                missing = ends[name] - len(tokens)
                on_event("turn", name=name, number=turn + 1, missing=missing)
                ids = generate_with_store(
                    model, store, name, torch.tensor([tokens]),
                    commit_every=max(1, num_tokens // 8), max_new_tokens=missing,
                    min_new_tokens=missing, do_sample=True, temperature=0.8, top_p=0.9,
                    custom_generate=sample, seed=SEED, streamer=Words(lambda: on_event("token")),
                )  # fmt: skip
                said[name] = ids[0].tolist()
        return {name: list(tokens) for name, tokens in said.items()}


def talk_in_process(folder: Path, store: Path, num_tokens: int, events: Connection) -> None:
    """Talk, and send what happens."""

    def tell(kind: str, **details: object) -> None:
        events.send({"kind": kind, **details})

    torch.set_num_threads(1)  # as the process that starts this one: sums are in the same order
    model, tokenizer = load_model(folder)
    tell("end", tokens=talk(model, tokenizer, store, num_tokens, tell))
