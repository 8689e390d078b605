"""``Decoding.generate(store=...)``: the prompts of a decoder-only model in a ``KVStore``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lmdecode._checks import type_error
from lmdecode.causal_fingerprint import check_causal_store
from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.decoder.engine.prompts import PromptStore
from lmdecode.decoder.engine.request import ReadSequence
from lmdecode.decoder.prompt_states import PromptStates, lengths_to_store
from lmdecode.integrations.transformers.store.conversation import Conversation
from lmdecode.integrations.transformers.store.request import (
    appended,
    check_is_store,
    read_request,
)
from lmdecode.models.packed_causal import PackedCausalModel

if TYPE_CHECKING:
    from lmdecode.store import Hit

__all__ = ["StoredCall"]

_OP = "Decoding.generate"
# Tokens after which a prompt, or an answer, is stored while the next ones are computed.
_COMMIT_PROMPT, _COMMIT_ANSWER = 2048, 32


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


class StoredCall:
    """One call of ``Decoding.generate`` with a store; nothing is looked up before its loop begins.

    Only keys and values of tokens that were read as a prompt are stored. Generated tokens attend by
    another kernel, with other bits, and are read again with the next prompt. Raises ValueError or
    TypeError that names an argument a call with a store cannot do, or shows both fingerprints.
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
        check_causal_store(_OP, decoding, store)
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

    def prompts(self, caches: CausalCaches) -> ConversationPrompts:
        """Return where the steps on these caches find the prompt, and keep what they read of it."""
        conversation = self._conversation = Conversation(
            self._store, self._session, self._request.tokens, b"", chunk_size=None,
            commit_every=_COMMIT_ANSWER, rewind=self._rewinds, caller=_OP,
        )  # fmt: skip
        conversation.begin(self._model, None)
        return ConversationPrompts(self._store, conversation, caches)

    def _note(self, sequences: Tensor) -> None:
        conversation = self._conversation
        if conversation is not None:
            conversation.append(sequences[0, conversation.num_tokens :].tolist())

    def saw(self, input_ids: Tensor) -> None:
        """Record the tokens so far, [rows, S], of a call without beams, and store them in parts."""
        conversation = self._conversation
        if conversation is None or len(input_ids) > 1:
            return
        self._seen = input_ids
        if conversation.is_due(input_ids.shape[1]):
            self._note(input_ids)
            conversation.commit_tokens(background=True)


class ConversationPrompts(PromptStore):
    """``PromptStore`` of the one prompt of a ``Conversation``; its rows continue that prompt."""

    def __init__(self, store: Any, conversation: Conversation, caches: CausalCaches) -> None:
        self._store, self._conversation, self._caches = store, conversation, caches
        self._states = PromptStates(store.fingerprint, conversation.num_tokens)
        self._length = 0  # that the states have
        self.has_windows = store.fingerprint.windows is not None

    def load(self, place: int, prompt: tuple[int, ...], longer_than: int) -> int:
        """See ``PromptStore``."""
        states = self._states

        def fill(hit: Hit) -> bool:
            count = hit.num_tokens
            if self._store.load(hit, out=states.reserve(count)) is None:
                return False
            self._caches.write(place, count, states.first(count))
            return True

        self._length = self._conversation.load(fill)
        if self._length == 0:  # a hit that was lost while it was read
            states.reserve(0)
        return self._length

    def keep_at(self, prompt: tuple[int, ...], read: int) -> list[int]:
        """See ``PromptStore``."""
        # With checkpoints a hit is only possible at the end of a stored prefix: store the prompt
        # without its last token, as the logits of that token must be computed.
        last = len(prompt) - self._store.fingerprint.has_checkpoints
        if read >= last:
            self._conversation.commit_tokens(background=True)
            return []
        ends, found = lengths_to_store(self._store, read, last), list[int]()
        for end in ends:
            found += range((found or [read])[-1] + _COMMIT_PROMPT, end, _COMMIT_PROMPT)
            found.append(end)
        return found if found[-1] == last else [*found, last]

    def copy(self, sequence: ReadSequence) -> None:
        """See ``PromptStore``; it is stored at once."""
        begin, length = self._length, sequence.read
        self._states.append(begin, self._caches.read(sequence.places[0], begin))
        self._conversation.commit_kv(self._states.first(length), length, background=True)
        self._length = length
