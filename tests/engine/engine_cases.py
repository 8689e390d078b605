"""Requests of every kind to an ``Engine``, and what there is of its caches."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lmdecode
from lmdecode import Engine, Request
from lmdecode.decoder.engine.encoder_decoder_steps import EncoderDecoderSteps
from tests.decoder.causal_steps import free_blocks
from tests.support.causal_models import EOS, VOCAB

CAPACITY = 120
ENGINE = str(Path(lmdecode.__file__).parent / "decoder/engine")


class OddTokens:
    """A grammar: of tokens with the oddness of the one before, another one; some have no way on."""

    def __init__(self, *, ends_after: int | None = None, breaks_after: int | None = None) -> None:
        self.count, self.ends, self.breaks = 0, ends_after, breaks_after

    def fill_bitmask(self, bitmask: Tensor) -> None:
        if self.count == self.breaks:
            raise LookupError("no such state")
        allowed = -0x55555556 if self.count % 2 else 0x55555555
        bitmask.fill_(0 if self.count == self.ends else allowed)

    def accept_token(self, token: int) -> None:
        assert self.count != self.ends and token % 2 == self.count % 2
        self.count += 1


def options_of(rng: random.Random) -> dict[str, Any]:
    """Return the arguments of a request, of any kind, that say all: they may be given twice."""
    kinds: list[dict[str, Any]] = [
        {},
        {"seed": rng.randrange(1 << 40), "temperature": 1.5, "top_k": 20},
        {"seed": rng.randrange(100), "top_p": 0.8, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "min_tokens": 5},
        {"seed": 3, "logprobs": rng.randrange(4), "frequency_penalty": 0.5},
        {"num_beams": 3, "length_penalty": 0.6, "num_return_sequences": 2},
        {"num_beams": 2, "early_stopping": True, "no_repeat_ngram_size": 3},
    ]
    options = rng.choice(kinds)
    return {**options, "max_new_tokens": rng.randrange(1, 24), "eos_token_id": [EOS, 5, 9]}


def prompt_of(rng: random.Random, shared: list[list[int]]) -> list[int]:
    """Return a prompt, which often begins as others."""
    begin = rng.choice([*shared, [], []])
    return begin + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 20))]


def alone(decoding: lmdecode.Decoding, prompt_ids: list[int], **options: Any) -> Any:
    """Return the result of a request with nothing else in an engine of its own."""
    engine = decoding.engine(max_requests=4, capacity=CAPACITY)
    request = engine.submit(prompt_ids, **options)
    run(engine, request)
    return request.result()


def outcome(result: Any) -> tuple[Any, ...]:
    """Return what two equal results have in common, as something that compares."""
    beams = result.beams
    lists = None if beams is None else (beams.sequences.tolist(), beams.scores.tolist())
    return result.tokens, result.finish_reason, result.logprobs, lists


def is_whole(engine: Engine) -> bool:
    """Whether nothing of an engine without requests is in use: no place, no row, no block."""
    return (
        engine.stats.free_places == engine.max_requests
        and not engine.has_work
        and engine._drawn.count == 0
        and not engine._searched.places
        and _is_empty(engine._model)
    )


def _is_empty(model: Any) -> bool:
    if isinstance(model, EncoderDecoderSteps):
        return bool(model._state.done.all()) and not bool(model._grows.any())
    places, caches = model.places, model.caches
    for place in list(places._prompts):
        places._forget(place)
    # Blocks of keys and values, or slots of states.
    pools = [pool.shape[3 if pool.dim() > 2 else 0] for pool in caches._tensors[::6]]
    return free_blocks(caches) == pools and bool((caches.lengths == 0).all())


def live_of(
    engine: Engine,
    rng: random.Random,
    arguments_of: Callable[[], dict[str, Any]],
    alone_of: Callable[[dict[str, Any]], Any],
) -> None:
    """One random life: requests come and are cancelled at any time; each text is the one alone."""
    has_thread = rng.random() < 0.3
    if has_thread:
        engine.start()
    left, running = 16, list[tuple[Request, dict[str, Any]]]()
    while left or (engine.has_work and not has_thread):
        if left and rng.random() < 0.4:
            arguments = arguments_of()
            running.append((engine.submit(**arguments), arguments))
            left -= 1
        if running and rng.random() < 0.06:
            rng.choice(running)[0].cancel()
        if not has_thread:
            rng.choice([engine.step, engine.run_ahead])()
    for request, arguments in running:
        got, want = request.result(timeout=120), alone_of(arguments)
        if got.finish_reason == "cancelled":
            assert got.tokens == want.tokens[: len(got.tokens)]
        else:
            assert outcome(got) == outcome(want)
    engine.stop()
    assert is_whole(engine)


def check_step_fails(
    monkeypatch: pytest.MonkeyPatch,
    engine: Engine,
    broken: tuple[Any, str],
    running: Sequence[Request],
) -> None:
    """Let a method, of a class, fail in a step: the requests that run end by it."""

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(*broken, fail)
        with pytest.raises(MemoryError):
            engine.step()
    for request in running:
        with pytest.raises(RuntimeError, match=r"a step failed \(no memory\)"):
            request.result()


def check_interrupts(
    monkeypatch: pytest.MonkeyPatch,
    engine: Engine,
    submit: Callable[[], list[Request]],
    want: Sequence[Any],
    is_empty: Callable[[], bool] = lambda: True,
) -> None:
    """Interrupt the first and the second step before each of their lines: nothing is held."""
    left = sys.maxsize

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        left -= event == "line"
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    def traced(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            before = sys.gettrace()
            sys.settrace(trace if left < sys.maxsize else before)
            try:
                return method(*arguments)
            finally:
                sys.settrace(before)

        return call

    for name in ("_admit", "_compute"):
        monkeypatch.setattr(engine, name, traced(getattr(engine, name)))
    for steps in range(2):
        for line in itertools.count():
            requests = submit()
            for _ in range(steps):
                engine.step()
            left = line
            try:
                engine.step()
            except KeyboardInterrupt:
                left = sys.maxsize
                assert is_empty()
            is_last, left = left < sys.maxsize, sys.maxsize
            run(engine, *requests)
            for request, wanted in zip(requests, want, strict=True):
                if request.finish_reason != "error" or is_last:
                    assert outcome(request.result()) == wanted
            assert is_empty() and is_whole(engine)
            if is_last:
                break


def run(engine: Engine, *requests: Request) -> None:
    """Do steps by hand until these have ended."""
    while not all(request.finished for request in requests):
        engine.step()


def greedy(decoding: lmdecode.Decoding, prompt: list[int], new: int) -> list[int]:
    """Return the text of a ``CausalBatch``, which knows nothing of engines."""
    batch, tokens = decoding.batch(max_requests=1, capacity=CAPACITY), list[int]()
    request = batch.add(prompt)
    for _ in range(new):
        logits = batch.step({request: tokens[-1]} if tokens else {})[request]
        tokens.append(int(torch.argmax(logits)))
    return tokens
