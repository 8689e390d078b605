"""What ``lmdecode verify`` has a model write, and the digest of it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmdecode._memory import bytes_of
from lmdecode.decoder.engine.engine import Engine
from lmdecode.decoder.engine.request import Request
from lmdecode.decoding import Decoding

__all__ = [
    "BATCH",
    "COMPARED",
    "Asked",
    "Bits",
    "Texts",
    "Written",
    "digest",
    "write_alone",
    "write_in_a_batch",
]

#: Requests of a batch.
BATCH = 64

#: A digest for each request, in their order.
Bits = tuple[str, ...]

_NEW = 24  # tokens of a text
_TOLD = {"logprobs": 16}  # of the best tokens of each place; the sampler has other ways without
_BEAMS = {"num_beams": 4, "num_return_sequences": 2}
_SAMPLED = {"temperature": 0.8, "top_p": 0.95}
_PENALISED = {
    "temperature": 1.1, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.2,
    "frequency_penalty": 0.2, "no_repeat_ngram_size": 3,
}  # fmt: skip
#: Of each request whose bits are compared: its kind, where its prompt begins and how many tokens it
#: has, parameters. Drafts meet long texts; the last two prompts begin alike.
COMPARED: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    ("greedy", 0, 7, _TOLD),
    ("sampled", 5, 40, {**_SAMPLED, **_TOLD, "seed": 1}),
    ("penalised", 10, 72, {**_PENALISED, **_TOLD, "seed": 2}),
    ("beams", 15, 90, _BEAMS),
    ("greedy, tokens alone", 20, 160, {"max_new_tokens": 64}),
    ("sampled, tokens alone", 25, 130, {**_SAMPLED, "seed": 3, "max_new_tokens": 64}),
    ("penalised, tokens alone", 30, 60, {**_PENALISED, "seed": 4}),
    ("sampled, long prompt", 35, 300, {"typical_p": 0.9, "temperature": 0.9, **_TOLD, "seed": 5}),
    ("greedy, longer prompt", 40, 600, _TOLD),
    ("beams, longer prompt", 40, 610, _BEAMS),
)
_COMPANY: tuple[dict[str, Any], ...] = ({}, _SAMPLED, _PENALISED, {"num_beams": 3})


class Asked(NamedTuple):
    """A request: its kind, its prompt, and arguments of ``Engine.submit``."""

    kind: str
    prompt: list[int]
    arguments: dict[str, Any]

    @property
    def places(self) -> int:
        """What it takes of an engine's ``max_requests``."""
        return int(self.arguments.get("num_beams", 1))


@dataclass(frozen=True)
class Written:
    """What came of requests.

    Attributes
    ----------
    bits
        A digest for each.
    cached
        Tokens of each prompt that came from a store.
    drafted, accepted
        Tokens that were drafted for all of them and their company, and those that were right.
    """

    bits: Bits
    cached: tuple[int, ...] = ()
    drafted: int = 0
    accepted: int = 0


class Texts:
    """The requests, made of the tokens of a text.

    Parameters
    ----------
    tokens
        What prompts are cut from, round and round: ids, at least one.
    context
        The most tokens that a text may have.

    Attributes
    ----------
    compared
        Requests whose bits are compared.
    company
        Those that fill the batch.
    """

    def __init__(self, tokens: Sequence[int], context: int) -> None:
        self.tokens, self.context = list(tokens), context
        most = context // 2  # new tokens
        room = context - most  # of a prompt
        self.compared = [
            Asked(
                kind,
                self._prompt(begin, min(length, room)),
                {**parameters, "max_new_tokens": min(parameters.get("max_new_tokens", _NEW), most)},
            )
            for kind, begin, length, parameters in COMPARED
        ]
        self.company = [
            Asked(
                "company",
                self._prompt(3 * number + 1, min(1 + 11 * number % 60, room)),
                {
                    "max_new_tokens": min(3 + number % 16, most),
                    **_with_seed(_COMPANY[number % len(_COMPANY)], number),
                },
            )
            for number in range(BATCH - len(self.compared))
        ]

    def _prompt(self, begin: int, length: int) -> list[int]:
        return [self.tokens[(begin + i) % len(self.tokens)] for i in range(length)]

    def batch(self) -> Iterator[tuple[Asked, bool]]:
        """All requests, and whether each is compared: those lie apart, the first and last are."""
        company = iter(self.company)
        last = len(self.compared) - 1
        places = {round(number * (BATCH - 1) / last): number for number in range(last + 1)}
        for place in range(BATCH):
            number = places.get(place)
            yield (next(company), False) if number is None else (self.compared[number], True)


def _with_seed(parameters: dict[str, Any], seed: int) -> dict[str, Any]:
    return {**parameters, "seed": 100 + seed} if "temperature" in parameters else parameters


def digest(parts: Sequence[bytes | memoryview | str]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of parts."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part)
    return found.hexdigest()[:16]


def _bits(request: Request) -> str:
    """The digest of a request: its tokens, their log-probabilities, those of the best tokens."""
    result = request.result()
    parts: list[bytes | memoryview] = [struct.pack(f"<{len(result.tokens)}q", *result.tokens)]
    for token in result.logprobs or ():
        ids, values = zip((token.token, token.logprob), *token.top, strict=True)
        parts.append(struct.pack(f"<{len(ids)}q{len(values)}d", *ids, *values))
    if result.beams is not None:
        found = result.beams
        for tensor in (found.sequences, found.lengths, found.scores, found.log_probs):
            parts.append(bytes_of(tensor.contiguous()))
    return digest(parts)


def _submit(engine: Engine, asked: Asked) -> Request:
    return engine.submit(asked.prompt, eos_token_id=(), **asked.arguments)


def _capacity(requests: Sequence[Asked]) -> int:
    return max(len(asked.prompt) + asked.arguments["max_new_tokens"] for asked in requests)


def write_alone(decoding: Decoding, requests: Sequence[Asked], **options: Any) -> Written:
    """Have each request written by an engine that has no other.

    Parameters
    ----------
    options
        As of ``Decoding.engine``.
    """
    bits, cached, drafted, accepted = [], [], 0, 0
    for asked in requests:
        with decoding.engine(
            max_requests=asked.places, capacity=_capacity([asked]), **options
        ) as engine:
            request = _submit(engine, asked)
            bits.append(_bits(request))
        cached.append(request.stats.cached_tokens)
        drafted += engine.stats.drafted_tokens
        accepted += engine.stats.accepted_tokens
    return Written(tuple(bits), tuple(cached), drafted, accepted)


def write_in_a_batch(decoding: Decoding, texts: Texts, **options: Any) -> Written:
    """Have the requests written beside others; half of all come while texts are being written."""
    everyone = list(texts.batch())
    places = sum(asked.places for asked, _ in everyone)
    capacity = _capacity([asked for asked, _ in everyone])
    with decoding.engine(max_requests=places, capacity=capacity, **options) as engine:
        requests = [_submit(engine, asked) for asked, _ in everyone[: BATCH // 2]]
        next(iter(requests[0]))
        requests += [_submit(engine, asked) for asked, _ in everyone[BATCH // 2 :]]
        for request in requests:
            request.result()
        bits = [
            _bits(request)
            for request, (_, is_compared) in zip(requests, everyone, strict=True)
            if is_compared
        ]
        stats = engine.stats
    return Written(tuple(bits), (), stats.drafted_tokens, stats.accepted_tokens)
