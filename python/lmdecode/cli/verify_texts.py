"""Inputs of ``lmdecode verify``: texts that a model writes, ops on fixed inputs, and digests."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lmdecode._memory import bytes_of
from lmdecode.beam.ops import beam_step, log_softmax_top_k
from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.decoder.engine.engine import Engine
from lmdecode.decoder.engine.request import Request
from lmdecode.decoding import Decoding
from lmdecode.kv_cache.reorder import reorder_cache_
from lmdecode.linear.packed_linear import PackedLinear
from lmdecode.sampling.ops import top_k_top_p_sample
from lmdecode.sampling.sampler import Sampler

__all__ = [
    "BATCH", "COMPARED", "EAGER_ROWS", "OPS", "Asked", "Bits", "Texts", "Written", "bits_of_ops",
    "digest", "eager_bits", "write_alone", "write_in_a_batch",
]  # fmt: skip

#: Requests of a batch.
BATCH = 64

#: A digest for each request, in their order.
Bits = tuple[str, ...]

_NEW = 24  # tokens of a text
_TOLD = {"logprobs": 16}  # best tokens of each place; without them the sampler takes other paths
_BEAMS = {"num_beams": 4, "num_return_sequences": 2}
_SAMPLED = {"temperature": 0.8, "top_p": 0.95}
_PENALISED = {
    "temperature": 1.1, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.2,
    "frequency_penalty": 0.2, "no_repeat_ngram_size": 3,
}  # fmt: skip
#: The compared requests: kind, where the prompt begins, its tokens, parameters. Drafts meet long
#: texts; the last two prompts begin alike.
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
        """Its places among an engine's ``max_requests``."""
        return int(self.arguments.get("num_beams", 1))


@dataclass(frozen=True)
class Written:
    """A digest of each request, and the tokens of each prompt that came from a store.

    ``drafted`` and ``accepted`` count tokens of all requests and their company.
    """

    bits: Bits
    cached: tuple[int, ...] = ()
    drafted: int = 0
    accepted: int = 0


class Texts:
    """Requests with prompts cut from the tokens of a text, round and round, for a model's context.

    The bits of ``compared`` are compared; ``company`` fills the batch.
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
    """Return the digest of a request's tokens and log-probabilities, also of the best tokens."""
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
    """Write each request by an engine that has no other; options as of ``Decoding.engine``."""
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


#: Rows that the eager model reads.
EAGER_ROWS = 17


def eager_bits(rows: int) -> Bits:
    """Return a digest for each row of an eager model of torch, which reads ``rows`` at a time."""
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(50, 2, 77, 0.0, "gelu", batch_first=True)
        model = torch.nn.Sequential(layer, torch.nn.Linear(50, 333)).eval()
        x = torch.randn(EAGER_ROWS, 9, 50)
        logits = torch.cat([model(part).log_softmax(-1) for part in x.split(rows)])
    return tuple(digest([bytes_of(row.contiguous())]) for row in logits)


# Vocabularies, some of which end within a vector, and rows: many of the small ones, where the last
# bit of each weight shows in a log-probability.
_VOCABS = ((1, 4), (5, 128), (17, 128), (33, 128), (100, 64), (1000, 16), (4099, 4), (32000, 2))
_FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_k": 50, "top_p": 0.9, "temperature": 0.7},
    {"top_p": 0.6, "min_p": 0.02},
    {"min_p": 0.1, "temperature": 1.7},
)
_STAGES: tuple[dict[str, Any], ...] = (
    {"typical_p": 0.9},
    {"epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3},
    {"top_n_sigma": 1.0, "xtc_probability": 0.9, "xtc_threshold": 0.05},
    {"top_h": 0.5, "dynamic_temperature_range": 0.5},
    {"mirostat_tau": 3.0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.1,
     "no_repeat_ngram_size": 2, "dry_multiplier": 0.8, "top_k": 40},
)  # fmt: skip
_SAMPLER_VOCABS = ((33, 64), (1000, 16), (4099, 4))
_BEAM_VOCABS = ((17, 64), (33, 64), (1000, 8), (4099, 4))  # vocabularies, and requests
_STEPS = 4


def _values(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    """Numbers of a seed; in the last dimension some are equal, and one is -inf."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(*shape, generator=generator) * scale
    if shape[-1] > 8:
        found[..., 2::7] = found[..., 1:2]
        found[..., 5] = -torch.inf
    return found


def _integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def _samples() -> Iterator[Any]:
    for vocab, rows in _VOCABS:
        for number, filters in enumerate(_FILTERS):
            for kind in (torch.float32, torch.bfloat16):
                logits = _values(rows, vocab, seed=number).to(kind)
                yield top_k_top_p_sample(
                    logits, **filters, seed=number, return_logits=True, return_logprob=True
                )


def _stages() -> Iterator[Any]:
    for vocab, rows in _SAMPLER_VOCABS:
        for number, parameters in enumerate(_STAGES):
            sampler = Sampler(
                rows, vocab, seed=list(range(rows)), num_logprobs=8, return_logits=True,
                **parameters,
            )  # fmt: skip
            for step in range(_STEPS):
                out = sampler.sample(_values(rows, vocab, seed=10 * number + step))
                yield [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]


def _beams() -> Iterator[Any]:
    beams = 3
    for vocab, requests in _BEAM_VOCABS:
        state = new_beam_state(requests, beams, _STEPS + 1)
        state.lengths.fill_(1)
        parameters = beam_parameters(requests, beams, end_tokens=[7], max_lengths=_STEPS + 1)
        rows = requests * beams
        processors: tuple[dict[str, Any], ...] = (
            {},
            {"sequences": _integers(vocab, rows, 9), "repetition_penalty": 1.3,
             "no_repeat_ngram_size": 2, "bias": _values(rows, vocab, scale=0.3),
             "suppressed_tokens": _integers(vocab, 3), "end_tokens": torch.tensor([7]),
             "min_lengths": 12, "diversity_tokens": _integers(vocab, requests, 2),
             "diversity_penalty": 0.4},
        )  # fmt: skip
        for step in range(_STEPS):
            logits, scores = _values(rows, vocab, seed=step), _values(rows, seed=step)
            for more in processors:
                found = log_softmax_top_k(logits, scores, 2 * beams, num_beams=beams, **more)
                yield found
            yield beam_step(state, parameters, found.scores, found.tokens, found.beams)
            yield state


def _caches() -> Iterator[Any]:
    parents = torch.tensor([2, 0, 0, 3, 1])
    shapes = ((0, (5, 2, 3, 32)), (0, (5, 2, 700, 31)), (1, (300, 5, 7)), (0, (5, 2, 1700, 128)))
    for kind in (torch.float32, torch.bfloat16, torch.int8):
        for dim, shape in shapes:
            numbers = torch.arange(math.prod(shape), dtype=torch.int32)
            caches = [((i + 1) * numbers % 101).to(kind).view(shape) for i in range(2)]
            reorder_cache_(caches, parents, batch_dim=dim)
            yield caches


def _integer_products() -> Iterator[Any]:
    for dtype in ("int8", "int4"):
        for size_in, size_out in ((96, 40), (256, 300)):
            weight = _values(size_out, size_in, scale=0.1).clamp(-9, 9)
            layer = PackedLinear(weight, dtype=dtype)
            for rows in (1, 5, 33):
                yield layer(_values(rows, size_in, seed=rows).clamp(-9, 9))


#: Kinds of ops, and functions that yield the results of calls.
OPS: dict[str, Callable[[], Iterator[Any]]] = {
    "top_k_top_p_sample": _samples,
    "Sampler": _stages,
    "beam search": _beams,
    "reorder_cache_": _caches,
    "int8 and int4 products": _integer_products,
}


def bits_of_ops() -> Bits:
    """Return a digest of the results of each kind, by the kernels of this process."""
    return tuple(
        digest(
            [bytes_of(x.contiguous()) for x in tree_leaves(list(calls())) if isinstance(x, Tensor)]
        )
        for calls in OPS.values()
    )
