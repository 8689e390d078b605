"""Completions by Ray Serve: streams, clients that are slow or go, a replica that is killed."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("transformers")

from ray_stand_in import KJV

pytest.importorskip("ray")
pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

import ray
from ray import serve
from serve_client import post, start_serve

import lmdecode
from lmdecode.integrations.ray import build_app

STREAMS = 200


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    port = start_serve()
    batching = {"capacity": 512}
    app = build_app(KJV, name="kjv", num_replicas=2, batching=batching)
    serve.run(app, name="app", route_prefix="/")
    yield port
    serve.shutdown()
    ray.shutdown()


def opened(port: int, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}),
                       {"Content-Type": "application/json"})  # fmt: skip
    response = connection.getresponse()
    assert response.status == 200
    return connection, response


def pieces(response: Any) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            if line.strip() == b"data: [DONE]":
                return
            yield json.loads(line[6:])


def streamed(port: int, body: dict[str, Any], wait: float = 0.0) -> tuple[str, str]:
    connection, response = opened(port, body)
    text, finish = "", ""
    for piece in pieces(response):
        time.sleep(wait)
        text += piece["choices"][0]["text"]
        finish = piece["choices"][0]["finish_reason"] or finish
    connection.close()
    return text, finish


def body_of(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "model": "kjv", "prompt": f"And {number} the LORD", "max_tokens": 12, "seed": number,
        "temperature": 0.9, "top_p": 0.95, **changes,
    }  # fmt: skip


def test_a_text_is_that_of_generate_with_its_seed(port: int) -> None:
    status, got = post(port, body_of(3))
    assert status == 200 and got["object"] == "text_completion" and got["model"] == "kjv"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lmdecode.integrations.transformers import sample

    tokenizer = AutoTokenizer.from_pretrained(KJV)
    model = AutoModelForCausalLM.from_pretrained(KJV)
    inputs = tokenizer(body_of(3)["prompt"], return_tensors="pt")
    ids = model.generate(
        **inputs, do_sample=True, temperature=0.9, top_p=0.95, top_k=0, max_new_tokens=12, seed=3,
        custom_generate=sample,
    )  # fmt: skip
    new = ids[0, inputs.input_ids.shape[1] :]
    assert got["choices"][0]["text"] == tokenizer.decode(new, skip_special_tokens=True)
    assert got["usage"]["completion_tokens"] == len(new)
    greedy = post(port, body_of(3, temperature=0))[1]["choices"][0]["text"]
    assert (
        greedy
        == post(port, body_of(4, prompt=body_of(3)["prompt"], temperature=0))[1]["choices"][0][
            "text"
        ]
    )


def test_errors_and_models(port: int) -> None:
    status, got = post(port, body_of(1, max_tokens=0))
    assert status == 400 and got["error"]["param"] == "max_tokens"
    assert post(port, [1])[0] == 400
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", "{", {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 400
    assert json.loads(response.read())["error"]["param"] == "body"
    connection.close()
    status, got = post(port, body_of(1, stop=5))
    assert status == 400 and got["error"]["param"] == "stop"
    assert post(port, body_of(1, suffix="x"))[1]["error"]["param"] == "suffix"
    assert len(post(port, body_of(1, n=3))[1]["choices"]) == 3
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/v1/models")
    assert json.loads(connection.getresponse().read())["data"][0]["id"] == "kjv"
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200


def test_chats_tokens_and_metrics(port: int) -> None:
    """The application is that of lmdecode.serving, with all its paths."""
    assert http_get(port, "/metrics").startswith("# HELP lmdecode_")
    assert "<title>lmdecode</title>" in http_get(port, "/")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": []}))
    response = connection.getresponse()
    assert response.status == 400 and b"messages" in response.read()
    connection.close()


def http_get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def test_stop_texts(port: int) -> None:
    text = post(port, body_of(5))[1]["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    for got in (post(port, body_of(5, stop=[stop]))[1]["choices"][0]["text"],
                streamed(port, body_of(5, stop=stop))[0]):  # fmt: skip
        assert got == text[: text.index(stop)]


def test_two_hundred_streams_a_slow_client_and_one_that_goes(port: int) -> None:
    alone = {number: post(port, body_of(number))[1]["choices"][0]["text"] for number in (0, 7, 99)}
    slow: list[tuple[str, str]] = []
    other = threading.Thread(
        target=lambda: slow.append(streamed(port, body_of(7, max_tokens=12), wait=0.3))
    )
    other.start()
    leaving, response = opened(port, body_of(1000, max_tokens=400))
    next(pieces(response))
    leaving.sock.close()  # in the middle
    leaving.close()
    with ThreadPoolExecutor(STREAMS) as threads:
        found = list(threads.map(lambda number: streamed(port, body_of(number)), range(STREAMS)))
    other.join(120)
    assert all(finish in ("stop", "length") for _, finish in found)
    for number, text in alone.items():
        assert found[number][0] == text
    assert slow[0][0] == alone[7]
    # The place of the one that left is free.
    end = time.monotonic() + 60
    seen: list[dict[str, int]] = []
    while time.monotonic() < end and not any(health["abandoned"] for health in seen):
        seen.append(health_of(port))
    assert any(health["abandoned"] == 1 for health in seen)
    assert seen[-1]["answering"] == 0
    assert post(port, body_of(0))[1]["choices"][0]["text"] == alone[0]


def health_of(port: int) -> dict[str, int]:
    """Of one of the replicas."""
    found: dict[str, int] = json.loads(http_get(port, "/health"))
    return found


def test_more_than_wait_are_refused(port: int) -> None:
    batching = {"capacity": 128, "max_step_tokens": 64}
    small = build_app(KJV, name="kjv", max_requests=1, max_waiting=2, batching=batching)
    serve.run(small, name="small", route_prefix="/small")
    with ThreadPoolExecutor(12) as threads:
        found = list(
            threads.map(
                lambda n: post(port, body_of(n, max_tokens=60), path="/small")[0], range(12)
            )
        )
    serve.delete("small")
    assert set(found) == {200, 503} and found.count(200) >= 2  # the first may still wait itself


def test_a_chat_goes_on_with_another_replica(port: int) -> None:
    first = post(port, body_of(11))[1]["choices"][0]["text"]
    chat = body_of(12, prompt=body_of(11)["prompt"] + first + " And")
    expected = post(port, chat)[1]["choices"][0]["text"]
    actors = [
        actor for actor in ray.util.list_named_actors(all_namespaces=True)
        if "Completions" in actor["name"]
    ]  # fmt: skip
    assert len(actors) == 2
    ray.kill(ray.get_actor(actors[0]["name"], namespace=actors[0]["namespace"]))
    end = time.monotonic() + 120
    got: list[str] = []
    while len(got) < 4 and time.monotonic() < end:  # a client asks again
        try:
            status, answer = post(port, chat, timeout=60)
        except OSError:
            continue
        if status == 200:
            got.append(answer["choices"][0]["text"])
    assert got == [expected] * 4


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="num_replicas is 0"):
        build_app(KJV, num_replicas=0)
    with pytest.raises(ValueError, match="dtype is 'int3'"):
        build_app(KJV, dtype="int3")
    with pytest.raises(ValueError, match="batching has 'num_blocks'; expected capacity and max"):
        build_app(KJV, batching={"num_blocks": 8})
    for store in ({}, {"path": "a"}, {"capacity_bytes": 1}):
        with pytest.raises(ValueError, match="expected path, and capacity_bytes or"):
            build_app(KJV, store=store)
    with pytest.raises(ValueError, match="serving has 'colour'"):
        build_app(KJV, serving={"colour": 1})
    with pytest.raises(TypeError, match="store is str"):
        build_app(KJV, store="folder")  # type: ignore[arg-type]
    assert lmdecode.__version__
