"""Steps of an ``Engine`` of an encoder-decoder model, and whole calls of ``generate()``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lmdecode
from benchmarks.decoder.bench_decoding import make_model
from benchmarks.harness import LIMIT, OURS, Case, Contestant
from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.beam.token_rules import new_token_rules
from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.decoder.searches import DecodingSearches

GROUP = "engine"
GENERATE = "generate"
_KJV = Path(__file__).parents[2] / "examples" / "kjv_mistral" / "model"
_PROMPT, _NEW = 16, 64
_CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9},
}
SOURCE = list(range(5, 29))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"seed": 1, "top_k": 40},
    "4 beams": {"num_beams": 4},
}


def _engine(decoding: lmdecode.Decoding, requests: int, steps: int, **options: Any) -> None:
    engine = decoding.engine(max_requests=requests, capacity=64, source=len(SOURCE))
    texts = [
        engine.submit([1], input_ids=SOURCE, max_new_tokens=60, eos_token_id=(), **options)
        for _ in range(requests)
    ]
    for _ in range(steps):
        engine.step()
    del texts  # a request that is dropped is cancelled


def _op(decoding: lmdecode.Decoding, requests: int, steps: int, num_beams: int = 1) -> None:
    """As many steps that also choose: the most probable token, or beams."""
    state = new_beam_state(requests, num_beams, 64)
    state.sequences[:, :, 0] = 1
    state.lengths.fill_(1)
    parameters = beam_parameters(requests, num_beams, prompt_lengths=1, max_lengths=64)
    decoder: Any = decoding.decoder
    searches = DecodingSearches(
        decoder, state, parameters, new_token_rules(requests), len(SOURCE),
        num_candidates=2 * num_beams if num_beams > 1 else 1, greedy=num_beams == 1,
    )  # fmt: skip
    memory, lengths = decoding.encoder.memories([SOURCE] * requests)
    searches.read_memory(memory, lengths, torch.arange(requests))
    for _ in range(steps):
        searches.run(1)
    searches.release()


def _contestants(
    with_peers: bool, *, requests: int, kind: str, layers: int, size: int, vocab: int
) -> list[Contestant]:
    decoding = lmdecode.Decoding.from_pretrained(make_model(layers, size, vocab))
    options = KINDS[kind]

    def contestant(name: str, run: Callable[[int], None]) -> Contestant:
        return Contestant(name, partial(run, 50), shorter=(partial(run, 10), 40))

    ours = contestant(OURS, lambda steps: _engine(decoding, requests, steps, **options))
    num_beams = options.get("num_beams", 1)
    op = contestant(LIMIT, lambda steps: _op(decoding, requests, steps, num_beams))
    return [ours, op] if with_peers else [ours]


def _generate(with_peers: bool, *, kind: str, dtype: str) -> list[Contestant]:
    """``generate()`` of the shipped model: transformers' own, and the forward passes alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(_KJV, dtype=torch.float32).eval()
    decoding = lmdecode.Decoding.from_pretrained(model, dtype=dtype)
    prompt = torch.randint(10, 4000, (1, _PROMPT), generator=torch.Generator().manual_seed(0))
    options = {**_CALLS[kind], "max_new_tokens": _NEW, "eos_token_id": None}
    text = decoding.generate(prompt, **options)[0]
    caches: Any = CausalCaches(decoding.decoder, 1, _PROMPT + _NEW)  # type: ignore[arg-type]
    first, entry = torch.tensor([[0, _PROMPT, 1, 1]]), torch.tensor([[0, 1, 0, 1]])

    def forwards() -> None:
        caches.truncate([0], [0])
        caches.forward(text[:_PROMPT], first, 1)
        for at in range(_PROMPT, _PROMPT + _NEW - 1):
            caches.forward(text[at : at + 1], entry, 1)

    ours = Contestant(OURS, lambda: decoding.generate(prompt, **options))
    others = [
        Contestant("transformers", lambda: model.generate(prompt, **options)),
        Contestant(LIMIT, forwards),
    ]
    return [ours, *others] if with_peers else [ours]


def _generate_cases(quick: bool) -> list[Case]:
    return [
        Case(
            GENERATE,
            f"{_NEW} tokens, {kind}",
            {"model": "kjv_mistral", "dtype": dtype},
            partial(_generate, kind=kind, dtype=dtype),
            clock="process",
            threads=1,
        )
        for dtype in (("int8",) if quick else ("float32", "bfloat16", "int8"))
        for kind in _CALLS
    ]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` the smallest ones."""
    sizes = [(2, 64, 1000)] if quick else [(2, 64, 1000), (6, 512, 32000)]
    return [
        Case(
            GROUP,
            f"a step, {kind}",
            {"layers": layers, "D": size, "V": vocab, "requests": requests},
            partial(
                _contestants, requests=requests, kind=kind, layers=layers, size=size, vocab=vocab
            ),
            clock="process",
            threads=1,
        )
        for layers, size, vocab in sizes
        for kind in KINDS
        for requests in ((1,) if quick else (1, 16))
    ] + _generate_cases(quick)


def notes() -> list[str]:
    """Say what the table leaves open."""
    return [
        "engine: CPU time of a step, by difference, of Marian's shape with random weights. The "
        "limit is the same step of the decoder's op alone, which also chooses: the most probable "
        "token, or beams.",
        "generate: CPU time of a call of the shipped model for a prompt of 16 tokens. The limit is "
        "its forward passes alone, step by step from Python; transformers' model is float32.",
    ]
