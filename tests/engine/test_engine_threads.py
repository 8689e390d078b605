"""An ``Engine`` with a thread of its own: iterators, coroutines, starts and stops."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from tests.engine.engine_cases import CAPACITY, greedy, is_whole
from tests.support.causal_models import random_model, random_tokens

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [random_tokens(length, length).tolist() for length in (3, 40, 9, 1, 40, 64, 12, 5)]


@pytest.fixture(scope="module")
def decoding() -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(random_model("llama", "plain"))


@pytest.fixture(scope="module")
def wanted(decoding: lmdecode.Decoding) -> list[list[int]]:
    return [greedy(decoding, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("has_thread", [True, False])
def test_iterators_of_many_threads(
    decoding: lmdecode.Decoding, wanted: list[list[int]], has_thread: bool
) -> None:
    engine = decoding.engine(max_requests=3, capacity=CAPACITY, max_step_tokens=16)

    def read(prompt: list[int]) -> list[Any]:
        return list(engine.submit(prompt, max_new_tokens=12, eos_token_id=()))

    if has_thread:
        engine.start()
        engine.start()  # is started already
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, PROMPTS)) == wanted
    engine.stop()
    assert not engine.is_started and is_whole(engine)


@pytest.mark.parametrize("has_thread", [True, False])
def test_coroutines(decoding: lmdecode.Decoding, wanted: list[list[int]], has_thread: bool) -> None:
    engine = decoding.engine(max_requests=3, capacity=CAPACITY)

    async def read(prompt: list[int]) -> list[Any]:
        request = engine.submit(prompt, max_new_tokens=12, eos_token_id=())
        return [token async for token in request]

    async def read_all() -> list[list[Any]]:
        return await asyncio.gather(*map(read, PROMPTS))

    if has_thread:
        engine.start()
    assert asyncio.run(read_all()) == wanted
    engine.stop()
    assert is_whole(engine)


def test_those_who_wait_go_on_when_the_thread_stops(
    decoding: lmdecode.Decoding, wanted: list[list[int]]
) -> None:
    engine = decoding.engine(max_requests=2, capacity=CAPACITY)
    with engine:
        requests = [engine.submit(p, max_new_tokens=12, eos_token_id=()) for p in PROMPTS]
        assert next(iter(requests[0])) == wanted[0][0]
    assert [request.result(timeout=60).tokens for request in requests] == wanted
    assert is_whole(engine)


def test_cancelled_and_timed_out(decoding: lmdecode.Decoding) -> None:
    engine = decoding.engine(max_requests=1, capacity=250)
    request = engine.submit([5], max_new_tokens=249, eos_token_id=())
    with pytest.raises(TimeoutError, match="it goes on"):
        request.result(timeout=0)
    with engine:
        first = next(iter(request))
        request.cancel()
        got = request.result(timeout=60)
    assert got.tokens[0] == first and got.finish_reason in ("cancelled", "length")
    assert is_whole(engine)


LONG = {"max_new_tokens": 240, "eos_token_id": ()}


def test_a_request_that_is_dropped_is_cancelled(decoding: lmdecode.Decoding) -> None:
    engine = decoding.engine(max_requests=1, capacity=250)
    running, waiting = (engine.submit([token], **LONG) for token in (5, 6))
    last = engine.submit([7], max_new_tokens=3, eos_token_id=())
    reader = iter(running)
    next(reader)
    assert (engine.stats.running, engine.stats.waiting) == (1, 2)
    del running, waiting
    engine.step()
    assert (engine.stats.running, engine.stats.waiting) == (1, 1)  # the reader has the first one
    del reader
    assert last.result().finish_reason == "length"
    assert engine.stats.new_tokens < 10 and is_whole(engine)


class Held:
    """A grammar of all tokens, at the second of which steps wait."""

    def __init__(self) -> None:
        self.goes_on, self._is_first = threading.Event(), True

    def fill_bitmask(self, bitmask: torch.Tensor) -> None:
        bitmask.fill_(-1)

    def accept_token(self, token: int) -> None:
        assert self._is_first or self.goes_on.wait(60)
        self._is_first = False


@pytest.mark.parametrize("has_thread", [True, False])
def test_a_task_that_is_cancelled_cancels_its_request(
    decoding: lmdecode.Decoding, has_thread: bool
) -> None:
    engine, held = decoding.engine(max_requests=4, capacity=250), Held()

    async def read(request: Any) -> list[Any]:
        return [token async for token in request]

    async def cancel() -> tuple[Any, ...]:
        requests = [engine.submit([5], grammar=held, **LONG)]
        requests += [engine.submit([token], **LONG) for token in (6, 7, 8)]
        streamed, awaited, shared, shielded = requests
        other = asyncio.create_task(shared.wait())
        tasks = [asyncio.create_task(read(request)) for request in (streamed, shared)]
        tasks.append(asyncio.create_task(awaited.wait()))
        await asyncio.sleep(0)  # they begin to wait
        while not streamed.stats.new_tokens:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        kept = asyncio.create_task(shielded.wait())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(kept), 0)
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        held.goes_on.set()
        return tuple(r.finish_reason for r in [await other, await kept, *map(end, requests)])

    def end(request: Any) -> Any:
        return request.result(timeout=60)

    if has_thread:
        engine.start()
    kept, ended = ("length",) * 2, ("cancelled", "cancelled", "length", "length")
    assert asyncio.run(cancel()) == kept + ended
    engine.stop()
    assert is_whole(engine)


def test_the_interpreter_may_end_while_it_computes() -> None:
    code = (
        "import lmdecode\nfrom tests.support.causal_models import random_model\n"
        "d = lmdecode.Decoding.from_pretrained(random_model('llama', 'plain'))\n"
        "e = d.engine(max_requests=4, capacity=250)\ne.start()\n"
        "r = e.submit([5], max_new_tokens=240, eos_token_id=())\nprint(next(iter(r)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.strip().isdigit(), done.stderr


def test_starts_and_stops_of_many_threads(
    decoding: lmdecode.Decoding, wanted: list[list[int]]
) -> None:
    engine = decoding.engine(max_requests=3, capacity=CAPACITY, max_step_tokens=16)
    is_over = threading.Event()

    def toggle() -> None:
        while not is_over.is_set():
            engine.start()
            engine.stop()

    with ThreadPoolExecutor(6) as pool:
        togglers = [pool.submit(toggle) for _ in range(2)]
        try:
            found = list(
                pool.map(
                    lambda p: engine.submit(p, max_new_tokens=12, eos_token_id=()).result().tokens,
                    PROMPTS * 3,
                )
            )
        finally:  # an error ends the test
            is_over.set()
    assert found == wanted * 3 and all(toggler.result() is None for toggler in togglers)
    assert not engine.is_started and is_whole(engine)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_does_its_own_steps(
    decoding: lmdecode.Decoding, wanted: list[list[int]]
) -> None:
    with decoding.engine(max_requests=1, capacity=CAPACITY) as engine:
        engine.submit(PROMPTS[0], max_new_tokens=12).result(timeout=60)
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            request = engine.submit(PROMPTS[1], max_new_tokens=12, eos_token_id=())
            os._exit(0 if request.result().tokens == wanted[1] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_failure_of_a_step_does_not_end_the_thread(
    decoding: lmdecode.Decoding, wanted: list[list[int]]
) -> None:
    engine = decoding.engine(max_requests=2, capacity=CAPACITY)
    forward, has_failed = engine._model.caches.forward, threading.Event()

    def fail_once(*arguments: Any, **options: Any) -> Any:
        if not has_failed.is_set():
            has_failed.set()
            raise MemoryError("no memory")
        return forward(*arguments, **options)

    engine._model.caches.forward = fail_once  # type: ignore[method-assign]
    with engine:
        failed = engine.submit(PROMPTS[0], max_new_tokens=12)
        with pytest.raises(RuntimeError, match="a step failed"):
            failed.result(timeout=60)
        request = engine.submit(PROMPTS[1], max_new_tokens=12, eos_token_id=())
        assert request.result(timeout=60).tokens == wanted[1]
    assert is_whole(engine)


@pytest.mark.parametrize("has_thread", [True, False])
def test_parts_and_the_end_in_an_event_loop(
    decoding: lmdecode.Decoding, wanted: list[list[int]], has_thread: bool
) -> None:
    """Parts join to the tokens; whoever waits for the end alone has the same result."""
    engine = decoding.engine(max_requests=4, capacity=CAPACITY)

    def submitted() -> list[lmdecode.Request]:
        return [engine.submit(p, max_new_tokens=12, eos_token_id=()) for p in PROMPTS]

    async def read_all() -> None:
        requests = submitted()
        results = await asyncio.gather(*(request.wait() for request in requests))
        assert [result.tokens for result in results] == wanted
        late = [part async for part in requests[0].parts()]
        assert late == [wanted[0]], "what is there comes at once"
        for request, tokens in zip(submitted(), wanted, strict=True):
            parts = [part async for part in request.parts()]
            assert [token for part in parts for token in part] == tokens and all(parts)

    if has_thread:
        engine.start()
    asyncio.run(read_all())
    engine.stop()
    assert is_whole(engine)
