"""Chats of Ray Serve in a store: replicas of a node share a folder, nodes a Redis."""

import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from ray_stand_in import KJV

pytest.importorskip("ray")
pytest.importorskip("fastapi")
pytest.importorskip("redis")

import ray
import redis
from ray import serve
from serve_client import free_port, post, start_serve

from lmdecode.integrations.ray import build_app

PROMPT = "And the LORD spake unto Moses, saying, Speak unto the children of Israel. " * 4


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    yield start_serve()
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped model without its window, whose blocks transformers would not share."""
    folder = tmp_path_factory.mktemp("model") / "kjv"
    shutil.copytree(KJV, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    return str(folder)


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    port = free_port()
    command = ["redis-server", "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port)
    while True:
        try:
            client.ping()
            break
        except redis.ConnectionError:
            assert server.poll() is None
            time.sleep(0.05)
    yield f"redis://127.0.0.1:{port}"
    client.close()
    server.kill()
    server.wait()


def start(model: str, store: dict[str, Any], num_replicas: int = 1) -> None:
    batching = {"capacity": 512, "max_step_tokens": 256}
    app = build_app(model, name="kjv", num_replicas=num_replicas, batching=batching, store=store)
    serve.run(app, name="app", route_prefix="/")


def body_of(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 12, "seed": 3, "temperature": 0.9}


def text_of(port: int, prompt: str) -> str:
    status, got = post(port, body_of(prompt))
    assert status == 200
    text: str = got["choices"][0]["text"]
    return text


def stats(port: int) -> dict[str, int]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/health")
    found: dict[str, int] = json.loads(connection.getresponse().read())["store"]
    connection.close()
    return found


def until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_replica_goes_on_where_another_was_killed(port: int, model: str, tmp_path: Path) -> None:
    """Both write one folder; what the first one computed the others find, and one that is new."""
    start(model, {"path": str(tmp_path / "store"), "capacity_bytes": 1 << 27}, num_replicas=2)
    first = text_of(port, PROMPT)
    chat = PROMPT + first + " And"
    expected = text_of(port, chat)
    actors = [
        actor for actor in ray.util.list_named_actors(all_namespaces=True)
        if "Completions" in actor["name"]
    ]  # fmt: skip
    assert len(actors) == 2
    time.sleep(3)  # "relaxed" makes durable what is older than a second
    for actor in actors:  # the one that has computed it, too
        ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
    answers: list[str] = []

    def is_answered() -> bool:
        try:
            status, got = post(port, body_of(chat))
        except OSError:
            return False
        if status == 200:
            answers.append(got["choices"][0]["text"])
        return status == 200

    until(is_answered, 120)
    assert answers == [expected]
    until(lambda: stats(port)["hits"] >= 1)  # of whichever replica answers
    serve.delete("app")


def test_nodes_share_what_a_redis_keeps(
    port: int, model: str, tmp_path: Path, redis_url: str
) -> None:
    """Another node: its disk has nothing of the chat, and it is not computed again."""
    options = {"capacity_bytes": 1 << 27, "remote": redis_url}
    start(model, {"path": str(tmp_path / "one"), **options})
    chat = PROMPT + text_of(port, PROMPT) + " And"
    until(lambda: stats(port)["remote_entries_written"] >= 1)
    expected = text_of(port, chat)
    serve.delete("app")
    start(model, {"path": str(tmp_path / "two"), **options})
    assert stats(port)["hits"] == 0
    assert text_of(port, chat) == expected
    found = stats(port)
    assert found["hits"] == 1 and found["remote_entries_fetched"] >= 1
    serve.delete("app")
