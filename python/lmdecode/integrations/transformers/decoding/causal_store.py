"""``Decoding.generate(store=...)``: the prompts of a decoder-only model in a ``KVStore``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lmdecode._checks import type_error
from lmdecode.decoder.causal_caches import CausalCaches, row_format
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.prompt_states import PromptStates
from lmdecode.integrations.transformers.decoding.causal_model import CausalModel
from lmdecode.integrations.transformers.store.conversation import Conversation
from lmdecode.integrations.transformers.store.request import (
    appended,
    check_is_store,
    read_request,
)
from lmdecode.system import cpu_capability

if TYPE_CHECKING:
    from lmdecode.store import Fingerprint, Hit, KVStore

__all__ = ["StoredCall", "causal_fingerprint", "check_store"]

_OP = "Decoding.generate"
# To be raised when the bits of keys and values change for the same packed weights.
_BITS = 1
# Tokens of a prompt after which it is stored while the next ones are read, and of an answer.
_COMMIT_PROMPT, _COMMIT_ANSWER = 2048, 32

_hashes: WeakKeyDictionary[PackedCausalModel, str] = WeakKeyDictionary()


def _weights_hash(packed: PackedCausalModel) -> str:
    from lmdecode.store.fingerprint import hash_tensor

    if packed not in _hashes:
        digest = hashlib.sha256(json.dumps([packed.sizes, packed.numbers]).encode())
        hash_tensor(digest, packed.layout)
        hash_tensor(digest, packed.memory)
        _hashes[packed] = digest.hexdigest()
    return _hashes[packed]


def causal_fingerprint(decoding: Any, tokenizer: Any = None) -> Fingerprint:
    """See ``Decoding.fingerprint``.

    Raises
    ------
    ValueError
        The model is not decoder-only.
    """
    from lmdecode.store import Fingerprint
    from lmdecode.store.fingerprint import hash_vocabulary

    packed = decoding.decoder
    if not isinstance(packed, PackedCausalModel):
        raise ValueError(
            "Decoding: the decoder of an encoder-decoder model has no fingerprint; expected a "
            "decoder-only model, or generate_with_store"
        )
    config = packed.config
    kind, row_size = row_format(config.head_size, decoding.cache_dtype)
    kind = torch.uint8 if kind == torch.int8 else kind  # as CausalCaches.read has it
    return Fingerprint(
        model_id=type(config if decoding.model is None else decoding.model).__name__,
        weights_hash=_weights_hash(packed),
        dtype=str(kind),
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_size=row_size,
        rope={"size": config.rotary_size, "of_layers": list(config.rotary)},
        window=config.windows if any(config.windows) else None,
        # Keys are turned; bits are those of a format of weights at a level of the CPU.
        layout=f"lmdecode.decoding.{_BITS}/{packed.weight_format}/{cpu_capability()}",
        tokenizer_hash=hash_vocabulary(tokenizer),
    )


def _check_fingerprint(op: str, decoding: Any, store: KVStore) -> None:
    """Raise where the store was opened for another model, whatever its name and tokenizer."""
    from lmdecode.store import FingerprintMismatchError

    theirs, ours = store.fingerprint, causal_fingerprint(decoding)
    ours = replace(ours, model_id=theirs.model_id, tokenizer_hash=theirs.tokenizer_hash)
    if theirs != ours:
        raise FingerprintMismatchError(
            f"{op}: the store has another fingerprint than Decoding.fingerprint(); the store's "
            f"and the model's:\n{theirs.difference(ours)}"
        )


def with_session(
    decoding: Any, store: Any, session: Any, inputs: Tensor | None, arguments: dict[str, Any]
) -> Tensor:
    """Return the session's tokens with the new ones; changes the mask in the arguments."""
    check_is_store(_OP, store)
    if not isinstance(session, str):
        raise type_error(_OP, "session", session, "a str, with append=True")
    new = arguments.pop("input_ids", None) if inputs is None else inputs
    ids, changed = appended(_OP, decoding.model, store.session(session), new, arguments)
    arguments.update(changed)
    return ids


def check_store(op: str, decoding: Any, store: Any) -> None:
    """Raise TypeError for what is no store, and an error for one of another model."""
    check_is_store(op, store)
    _check_fingerprint(op, decoding, store)


class StoredCall:
    """One call of ``Decoding.generate`` with a store; nothing is looked up before its loop begins.

    Keys and values are stored of what was read as a prompt alone: generated tokens attend by
    another kernel, in other bits, and are read again with the next prompt.

    Parameters
    ----------
    decoding
        The ``Decoding``.
    store, session
        See ``Decoding.generate``.
    inputs, arguments
        Those of ``generate()``.

    Raises
    ------
    ValueError, TypeError
        Names an argument that a call with a store cannot do, or shows both fingerprints.
    """

    def __init__(
        self,
        decoding: Any,
        store: Any,
        session: str | None,
        inputs: Tensor | None,
        arguments: dict[str, Any],
        rewind: bool = False,
    ) -> None:
        if store is None:
            raise TypeError(f"{_OP}: store is NoneType; expected a KVStore, which a session needs")
        check_is_store(_OP, store)
        if session is not None and not isinstance(session, str):
            raise type_error(_OP, "session", session, "str or None")
        if not isinstance(decoding.decoder, PackedCausalModel):
            raise ValueError(
                f"{_OP}: store is given; expected None for an encoder-decoder model, for which "
                "there is generate_with_store"
            )
        _check_fingerprint(_OP, decoding, store)
        given = arguments.get("input_ids") if inputs is None else inputs
        self._request = read_request(_OP, decoding.model, given, b"", arguments)
        self._store, self._session, self._model = store, session, decoding.model
        self._rewinds = rewind
        self._conversation: Conversation | None = None
        self._seen: Tensor | None = None

    def run(self, generate: Callable[[], Any]) -> Any:
        """Return the result of ``generate()``, and store the session's tokens."""
        try:
            result = generate()
        except BaseException:
            if self._seen is not None:
                self._note(self._seen)
            if self._conversation is not None:
                self._conversation.commit_tokens()
            raise
        self._note(result if isinstance(result, Tensor) else result.sequences)
        if self._conversation is not None:
            self._conversation.commit_tokens()
        return result

    def new_model(self, *arguments: Any) -> StoredCausalModel:
        """Return the model that the loop is to run; arguments are those of ``CausalModel``."""
        return StoredCausalModel(self, *arguments)

    def _note(self, sequences: Tensor) -> None:
        conversation = self._conversation
        if conversation is not None:
            conversation.append(sequences[0, conversation.num_tokens :].tolist())

    def read_prompt(self, caches: CausalCaches, prompt: Tensor) -> Tensor:
        """Read a prompt into the first sequence of empty caches, and return its last logits.

        What is stored of it is loaded instead, and the rest stored.
        """
        conversation = self._conversation = Conversation(
            self._store, self._session, self._request.tokens, b"", chunk_size=None,
            commit_every=_COMMIT_ANSWER, rewind=self._rewinds, caller=_OP,
        )  # fmt: skip
        conversation.begin(self._model, None)
        length, fingerprint = len(prompt), self._store.fingerprint
        states = PromptStates(fingerprint, length)

        def fill(hit: Hit) -> bool:
            count = hit.num_tokens
            if self._store.load(hit, out=states.reserve(count)) is None:
                return False
            caches.write(0, count, states.first(count))
            return True

        done = conversation.load(fill)
        if done == 0:  # a hit that was lost while it was read
            states.reserve(0)
        # Layers with a window hit where something stored ends: the same prompt before its last
        # token, whose logits are wanted.
        last = length if fingerprint.windows is None else length - 1
        is_new = done < last
        while True:
            end = min(done + _COMMIT_PROMPT, last) if done < last else length
            entry = torch.tensor([[0, end - done, 1, int(end == length)]])
            logits = caches.forward(prompt[done:end], entry, int(end == length))
            if end <= last:
                states.append(done, caches.read(0, done))
                conversation.commit_kv(states.first(end), end, background=True)
            if end == length:
                break
            done = end
        if not is_new:
            conversation.commit_tokens(background=True)
        return logits

    def saw(self, input_ids: Tensor) -> None:
        """Note the tokens so far, [rows, S], of a call without beams, and store them by and by."""
        conversation = self._conversation
        if conversation is None or len(input_ids) > 1:
            return
        self._seen = input_ids
        if conversation.is_due(input_ids.shape[1]):
            self._note(input_ids)
            conversation.commit_tokens(background=True)


class StoredCausalModel(CausalModel):
    """A model whose prompt is looked up in a store; arguments are those of ``CausalModel``."""

    def __init__(self, call: StoredCall, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._call = call

    def _read_prompts(self, leaders: list[int]) -> Tensor:
        assert leaders == [0]  # one row, and its beams
        return self._call.read_prompt(self.caches, self._prompts[0])

    def read(self, input_ids: Tensor) -> Tensor:
        self._call.saw(input_ids)
        return super().read(input_ids)
