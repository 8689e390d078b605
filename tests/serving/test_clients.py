"""Many clients at once: some vanish, some are slow, some are too many; texts are as alone."""

import gc
import http.client
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lmdecode.serving.text_model import TextModel
from tests.serving.servers import call, events, load_model, post, served

CLIENTS, VANISHING, SLOW = 256, 64, 16
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def model() -> TextModel:
    return load_model("int8")


@pytest.fixture(scope="module")
def port(model: TextModel) -> Iterator[int]:
    with served(model, max_requests=8, max_waiting=2 * CLIENTS) as port:
        yield port


def body_of(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "prompt": f"And {number} the LORD", "max_tokens": 10 + number % 7, "seed": number,
        "temperature": 0.9, "stream": number % 2 == 0, **changes,
    }  # fmt: skip


def text_of(port: int, body: dict[str, Any]) -> str:
    status, got = post(port, PATH, body)
    assert status == 200, got
    if body["stream"]:
        return "".join(piece["choices"][0]["text"] for piece in events(got))
    text: str = got["choices"][0]["text"]
    return text


def sent(port: int, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", port), timeout=120)
    client.sendall(head.encode() + data)
    return client


def wait_until_idle(port: int) -> dict[str, Any]:
    end = time.monotonic() + 60
    while (health := call(port, "GET", "/health")[1])["answering"] and time.monotonic() < end:
        time.sleep(0.05)
    found: dict[str, Any] = health
    return found


@pytest.mark.slow
def test_many_clients_of_whom_some_vanish_and_some_are_slow(port: int) -> None:
    numbers = range(CLIENTS)
    alone = {
        number: text_of(port, body_of(number)) for number in random.Random(0).sample(numbers, 24)
    }
    before = call(port, "GET", "/health")[1]["abandoned"]

    def vanish(number: int) -> None:
        client = sent(port, body_of(number, max_tokens=400, stream=number % 4 < 2))
        if number % 4 == 0:
            client.recv(100)
        time.sleep(0.01 * (number % 16))
        client.close()

    slow: dict[int, str] = {}

    def read_slowly(number: int) -> None:
        client = sent(port, body_of(number, stream=True))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += client.recv(1)  # a byte at a time, 64 of them without a pause
            if len(data) % 64 == 0:
                time.sleep(0.02)
        client.close()
        lines = [line for line in data.decode().splitlines() if line.startswith("data: {")]
        slow[number] = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)

    found: dict[int, str] = {}

    def read(number: int) -> None:
        found[number] = text_of(port, body_of(number))

    with ThreadPoolExecutor(CLIENTS + VANISHING + SLOW) as threads:
        works = [threads.submit(read_slowly, number) for number in list(alone)[:SLOW]]
        works += [threads.submit(vanish, 1000 + i) for i in range(VANISHING)]
        works += [threads.submit(read, number) for number in numbers]
        for work in works:
            work.result()
    assert len(found) == CLIENTS and len(slow) == SLOW
    for number, text in alone.items():
        assert found[number] == text
        assert slow.get(number, text) == text
    health = wait_until_idle(port)
    assert health["answering"] == 0
    # One that closed before its body was read had never asked.
    assert VANISHING // 2 < health["abandoned"] - before <= VANISHING


def test_a_client_that_goes_frees_its_place(port: int, model: TextModel) -> None:
    for stream in (True, False):
        client = sent(port, body_of(1, max_tokens=500, ignore_eos=True, stream=stream))
        while not call(port, "GET", "/health")[1]["answering"]:
            time.sleep(0.005)
        client.close()
        steps = [line for line in call(port, "GET", "/metrics")[1].splitlines()
                 if line.startswith("lmdecode_requests_running")]  # fmt: skip
        assert len(steps) == 1
        assert wait_until_idle(port)["answering"] == 0
        end = time.monotonic() + 30  # the next step frees it
        while "lmdecode_slots_free 8\n" not in call(port, "GET", "/metrics")[1]:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert "lmdecode_requests_running 0\n" in call(port, "GET", "/metrics")[1]


def test_more_than_wait_are_refused(model: TextModel) -> None:
    with served(model, max_requests=1, max_waiting=2) as port:
        body = body_of(3, max_tokens=60, stream=False, ignore_eos=True)

        def ask(_: int) -> tuple[int, Any, dict[str, str]]:
            return call(port, "POST", PATH, body)

        with ThreadPoolExecutor(12) as threads:
            found = list(threads.map(ask, range(12)))
        refused = [(got, headers) for status, got, headers in found if status == 429]
        assert refused and len(refused) <= 9
        assert {status for status, _, _ in found} == {200, 429}
        for got, headers in refused:
            assert got["error"]["code"] == "rate_limit_exceeded" and int(headers["retry-after"]) > 0
        assert len({got["choices"][0]["text"] for status, got, _ in found if status == 200}) == 1
        # To ask again would not help: there is never room for so many.
        status, got = post(port, PATH, {**body, "n": 4})
        assert status == 400 and got["error"]["param"] == "n"
        assert post(port, PATH, {**body, "n": 3, "max_tokens": 2})[0] == 200


def test_connections_are_kept(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for number in range(3):
        connection.request("POST", PATH, json.dumps(body_of(number, stream=number == 1)))
        response = connection.getresponse()
        assert response.status == 200 and response.read()
        assert not response.will_close
    connection.close()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_memory_stays_flat(port: int) -> None:
    """Short requests by the thousand leave nothing behind."""

    def ask(count: int) -> None:
        def some(first: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            for number in range(first, first + count // 8):
                connection.request("POST", PATH, json.dumps(body_of(number % 50, max_tokens=2)))
                assert connection.getresponse().read()
            connection.close()

        threads = [threading.Thread(target=some, args=(i * 1000,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    ask(1000)
    before = resident()
    ask(3000)
    assert resident() - before < 0.05 * before


def test_nothing_is_left_of_requests(port: int) -> None:
    """Not the objects of answers, nor a grammar each where every request has another."""
    from lmdecode.decoder.engine.request import Request
    from lmdecode.serving.grammar import CompiledGrammar, GrammarState
    from lmdecode.serving.work import Answer, Work

    def ask(number: int) -> None:
        choices = [f"yes {number}", f"no {number}"]
        body = body_of(number, max_tokens=40, guided_choice=choices)
        if number % 4 == 3:  # and it goes
            sent(port, body).close()
        else:
            assert text_of(port, body) in choices

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(160)))
    wait_until_idle(port)
    kinds = (Request, CompiledGrammar, GrammarState, Answer, Work)

    def alive() -> dict[str, int]:
        gc.collect()
        found = [type(thing) for thing in gc.get_objects() if type(thing) in kinds]
        return {kind.__name__: found.count(kind) for kind in kinds}

    end = time.monotonic() + 30  # connections are forgotten a moment later
    while alive()["Work"] and time.monotonic() < end:
        time.sleep(0.1)
    counts = alive()
    assert 0 < counts.pop("CompiledGrammar") <= 64
    assert not any(counts.values()), counts
