"""An ``Engine`` with a store: prompts are found by another engine, in the same bits."""

from __future__ import annotations

import asyncio
import copy
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
from lmdecode import KVStore
from lmdecode.store import FingerprintMismatchError
from tests.engine.engine_cases import CAPACITY, greedy, is_whole, outcome, run
from tests.support.causal_models import random_model, random_tokens

MODELS = {
    "llama": ("llama", "plain"),
    "windows": ("gemma2", "plain"),
    "two sizes of heads": ("gemma4_text", "shared keys, inputs of layers"),
    "convolutions": ("lfm2", "convolutions at the ends"),
    "delta rule": ("qwen3_5_text", "delta rule last, biases"),
    "Mamba-2": ("granitemoehybrid", "experts, multipliers"),
    "Mamba-2 beside attention": ("falcon_h1", "norm before the gate, tied"),
}


@pytest.fixture(scope="module", params=MODELS)
def decoding(request: pytest.FixtureRequest) -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(random_model(*MODELS[request.param]))


def opened(decoding: lmdecode.Decoding, path: Path) -> KVStore:
    return KVStore(
        path / "store", capacity_bytes=1 << 26, fingerprint=decoding.fingerprint(), chunk_tokens=16
    )


def engine_of(decoding: lmdecode.Decoding, store: Any) -> lmdecode.Engine:
    return decoding.engine(max_requests=4, capacity=CAPACITY, max_step_tokens=20, store=store)


OPTIONS: list[dict[str, Any]] = [{}, {"seed": 3, "temperature": 1.5}, {"num_beams": 3}]


def test_a_prompt_is_found_by_another_engine(decoding: lmdecode.Decoding, tmp_path: Path) -> None:
    prompt = random_tokens(80, 0).tolist()
    plain = engine_of(decoding, None)
    want = [
        outcome(plain.submit(prompt, max_new_tokens=10, **options).result()) for options in OPTIONS
    ]
    for turn in range(2):
        with opened(decoding, tmp_path) as store:
            engine = engine_of(decoding, store)
            requests = [engine.submit(prompt, max_new_tokens=10, **o) for o in OPTIONS]
            run(engine, *requests)
            engine.stop()  # waits for what is being written
            assert [outcome(request.result()) for request in requests] == want
            assert requests[0].stats.cached_tokens >= (64 if turn else 0)
            assert engine.stats.prompt_tokens < (20 if turn else 90) and is_whole(engine)


def test_a_prompt_with_nan_is_not_kept(tmp_path: Path) -> None:
    model = copy.deepcopy(random_model("llama", "plain"))
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = float("nan")
    broken = lmdecode.Decoding.from_pretrained(model)
    prompt = random_tokens(64, 0).clamp(min=4).tolist()
    with opened(broken, tmp_path) as store:
        engine = engine_of(broken, store)
        failed = engine.submit([*prompt[:-1], 3], max_new_tokens=3)
        with pytest.raises(RuntimeError, match="NaN"):
            failed.result()
        engine.stop()
        assert store.stats()["entries"] == 0
        engine.submit(prompt, max_new_tokens=3).result()
        engine.stop()
        assert store.stats()["entries"] > 0


def test_the_longest_of_what_there_is(decoding: lmdecode.Decoding, tmp_path: Path) -> None:
    system = random_tokens(64, 0).tolist()
    prompts = [[*system, *random_tokens(n, n).tolist()] for n in (1, 33, 20)]
    with opened(decoding, tmp_path) as store:
        for prompt in (prompts[0], prompts[1], prompts[1], prompts[2]):
            engine = engine_of(decoding, store)
            request = engine.submit(prompt, max_new_tokens=5, eos_token_id=())
            assert request.result().tokens == greedy(decoding, prompt, 5)
            engine.stop()
    assert request.stats.cached_tokens in (64, 80, 84, 0)


@pytest.mark.parametrize("kind", ["convolutions", "delta rule"])
def test_a_beginning_is_found_at_a_checkpoint(kind: str, tmp_path: Path) -> None:
    """Layers with a state: several prompts at once, which others begin with in another engine."""
    decoding = lmdecode.Decoding.from_pretrained(random_model(*MODELS[kind]))
    system = random_tokens(600, 0).tolist()
    prompts = [[*system, *random_tokens(n, n).tolist()] for n in (9, 60)]
    others = [[*system, *random_tokens(30, 30).tolist()], [*system[:300], *prompts[1]]]
    for turn, asked in enumerate((prompts, others)):
        with opened(decoding, tmp_path) as store:
            engine = decoding.engine(max_requests=4, capacity=1000, store=store)
            requests = [engine.submit(p, max_new_tokens=5, eos_token_id=()) for p in asked]
            run(engine, *requests)
            for prompt, request in zip(asked, requests, strict=True):
                ids = torch.tensor([prompt])
                whole = decoding.generate(ids, max_new_tokens=5, eos_token_id=None)
                assert [*prompt, *request.result().tokens] == whole[0].tolist()
            engine.stop()
            assert is_whole(engine) and store.verify().damage == ()
            if turn == 0:
                assert [store.lookup(system[:n]).num_tokens for n in (599, 300)] == [512, 256]
            else:
                assert [request.stats.cached_tokens for request in requests] == [512, 256]


def test_a_store_that_fails_is_a_warning(
    decoding: lmdecode.Decoding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_tokens(80, 0).tolist()
    store = opened(decoding, tmp_path)
    engine = engine_of(decoding, store)
    store.close()
    with pytest.warns(RuntimeWarning, match="Engine goes on without the store"):
        request = engine.submit(prompt, max_new_tokens=5, eos_token_id=())
        assert request.result().tokens == greedy(decoding, prompt, 5)
    assert is_whole(engine)


def test_what_is_refused(decoding: lmdecode.Decoding, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^Decoding.engine: store is .*expected a KVStore"):
        engine_of(decoding, "store")
    other = lmdecode.Decoding.from_pretrained(random_model("llama", "plain"), torch.bfloat16)
    with (
        opened(other, tmp_path) as store,
        pytest.raises(
            FingerprintMismatchError, match=r"^Decoding.engine: the store has another fingerprint"
        ),
    ):
        engine_of(decoding, store)


ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [random_tokens(length, length).tolist() for length in (3, 40, 9, 1, 40, 64, 12, 5)]


@pytest.fixture(scope="module")
def plain_decoding() -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(random_model("llama", "plain"))


@pytest.fixture(scope="module")
def wanted(plain_decoding: lmdecode.Decoding) -> list[list[int]]:
    return [greedy(plain_decoding, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("has_thread", [True, False])
def test_iterators_of_many_threads(
    plain_decoding: lmdecode.Decoding, wanted: list[list[int]], has_thread: bool
) -> None:
    engine = plain_decoding.engine(max_requests=3, capacity=CAPACITY, max_step_tokens=16)

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
def test_coroutines(
    plain_decoding: lmdecode.Decoding, wanted: list[list[int]], has_thread: bool
) -> None:
    engine = plain_decoding.engine(max_requests=3, capacity=CAPACITY)

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
    plain_decoding: lmdecode.Decoding, wanted: list[list[int]]
) -> None:
    engine = plain_decoding.engine(max_requests=2, capacity=CAPACITY)
    with engine:
        requests = [engine.submit(p, max_new_tokens=12, eos_token_id=()) for p in PROMPTS]
        assert next(iter(requests[0])) == wanted[0][0]
    assert [request.result(timeout=60).tokens for request in requests] == wanted
    assert is_whole(engine)


def test_cancelled_and_timed_out(plain_decoding: lmdecode.Decoding) -> None:
    engine = plain_decoding.engine(max_requests=1, capacity=250)
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


def test_a_request_that_is_dropped_is_cancelled(plain_decoding: lmdecode.Decoding) -> None:
    engine = plain_decoding.engine(max_requests=1, capacity=250)
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
    plain_decoding: lmdecode.Decoding, has_thread: bool
) -> None:
    engine, held = plain_decoding.engine(max_requests=4, capacity=250), Held()

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
    plain_decoding: lmdecode.Decoding, wanted: list[list[int]]
) -> None:
    engine = plain_decoding.engine(max_requests=3, capacity=CAPACITY, max_step_tokens=16)
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
    plain_decoding: lmdecode.Decoding, wanted: list[list[int]]
) -> None:
    with plain_decoding.engine(max_requests=1, capacity=CAPACITY) as engine:
        engine.submit(PROMPTS[0], max_new_tokens=12).result(timeout=60)
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            request = engine.submit(PROMPTS[1], max_new_tokens=12, eos_token_id=())
            os._exit(0 if request.result().tokens == wanted[1] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_failure_of_a_step_does_not_end_the_thread(
    plain_decoding: lmdecode.Decoding, wanted: list[list[int]]
) -> None:
    engine = plain_decoding.engine(max_requests=2, capacity=CAPACITY)
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
    plain_decoding: lmdecode.Decoding, wanted: list[list[int]], has_thread: bool
) -> None:
    """Parts join to the tokens; whoever waits for the end alone has the same result."""
    engine = plain_decoding.engine(max_requests=4, capacity=CAPACITY)

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
