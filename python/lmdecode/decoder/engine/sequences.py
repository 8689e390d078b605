"""Sequences of an ``Engine``: their prompts, and how their tokens are chosen."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest
from lmdecode.beam.token_rules import TokenRules
from lmdecode.decoder.engine.encoder_inputs import EncoderInput
from lmdecode.decoder.engine.request import RequestState
from lmdecode.sampling.sampler_rows import RowRules

__all__ = ["DrawnSequence", "Grammar", "ReadSequence", "SearchedSequence", "WrittenSequence"]


class Grammar(Protocol):
    """Constrains the tokens of one request, such as a matcher of xgrammar or llguidance.

    An error that it raises ends its request and becomes the request's error.
    """

    def fill_bitmask(self, bitmask: Tensor) -> None:
        """Write the allowed next tokens to [ceil(V / 32)] int32; see ``Sampler.sample``."""

    def accept_token(self, token: int) -> object:
        """Advance by a token."""


class ReadSequence:
    """A sequence that reads its prompt, and has places or waits for them.

    The first of its ``places`` reads the prompt; ``read`` is the number of tokens read. ``follows``
    is another sequence and the number of first tokens to share with it once that one has read them.
    ``stops`` are lengths at which parts of the prompt must end, for other sequences or the store;
    ``keep_at`` are the lengths at which it is written to the store, ascending.
    """

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        self.prompt_ids = prompt_ids
        self.places: list[int] = []
        self.read = 0
        self.follows: tuple[ReadSequence, int] | None = None
        self.stops: set[int] = set()
        self.keep_at: list[int] = []

    @property
    def num_beams(self) -> int:
        """Rows that it needs at most."""
        return 1

    def begin_with(self, length: int) -> None:
        """Begin with the first tokens of the prompt, which were read elsewhere."""
        self.read = length

    def next_part(self, room: int) -> int:
        """Return the number of prompt tokens to read next, at most ``room``."""
        end = min(len(self.prompt_ids), self.read + room)
        return min((stop for stop in self.stops if self.read < stop < end), default=end) - self.read


class WrittenSequence(ReadSequence):
    """The sequence of a request.

    ``input`` is the input of an encoder-decoder model until it is encoded.
    """

    def __init__(
        self, request: RequestState, max_new_tokens: int, end_tokens: tuple[int, ...]
    ) -> None:
        super().__init__(request.prompt_ids)
        self.request, self.max_new_tokens, self.end_tokens = request, max_new_tokens, end_tokens
        self.input: EncoderInput | None = None

    def with_input(self, input: EncoderInput | None) -> WrittenSequence:
        """Set the input; return the sequence."""
        self.input = input
        return self

    def begin_with(self, length: int) -> None:
        """See ``ReadSequence``."""
        super().begin_with(length)
        self.request.cached_tokens = length


class DrawnSequence(WrittenSequence):
    """A sequence that samples its tokens, or takes the largest logit.

    ``num_logprobs`` is -1 for none; ``last`` is the next token to read.
    """

    def __init__(
        self,
        request: RequestState,
        max_new_tokens: int,
        end_tokens: tuple[int, ...],
        rules: RowRules,
        num_logprobs: int,
        grammar: Grammar | None,
    ) -> None:
        super().__init__(request, max_new_tokens, end_tokens)
        self.rules, self.num_logprobs, self.grammar = rules, num_logprobs, grammar
        self.last = -1
        if num_logprobs >= 0:
            request.logprobs = []


class SearchedSequence(WrittenSequence):
    """A sequence with a beam search: ``search`` and ``token_rules`` for ``BeamSearch``."""

    def __init__(
        self, request: RequestState, search: BeamRequest, token_rules: TokenRules | None = None
    ) -> None:
        super().__init__(request, search.max_new_tokens, tuple(search.eos_token_id))
        self.search, self.token_rules = search, token_rules
        self.id: Hashable = None

    @property
    def num_beams(self) -> int:
        """Rows that it needs at most."""
        return self.search.num_beams
