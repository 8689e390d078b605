"""A server in this process for tests, over the shipped model, and clients of it."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("tokenizers")
uvicorn = pytest.importorskip("uvicorn")

from lmdecode.serving.app import create_app  # noqa: E402
from lmdecode.serving.text_model import TextModel  # noqa: E402

KJV = Path(__file__).resolve().parents[2] / "examples/kjv_mistral/model"
NAME = "kjv"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
# With tools, thoughts and calls, so that two conversations are the same if their prompts are.
AGENT_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def load_model(dtype: str = "float32", template: str = TEMPLATE) -> TextModel:
    return TextModel.load(KJV, dtype=dtype, name=NAME, chat_template=template)


@contextlib.contextmanager
def serving(app: Any) -> Iterator[int]:
    """Serve an application on a free port, which is yielded."""
    config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield bound.getsockname()[1]
        server.should_exit = True
        thread.join(30)


@contextlib.contextmanager
def served(
    model: TextModel, *, max_requests: int = 4, capacity: int = 512, **options: Any
) -> Iterator[int]:
    engine = model.decoding.engine(max_requests=max_requests, capacity=capacity)
    with serving(create_app(engine, model, **options)) as port:
        yield port
    engine.stop()


def call(
    port: int, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    """Return the status, the body, parsed where it is JSON, and the headers of a response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    kind = response.headers.get("content-type", "")
    found = json.loads(content) if kind.startswith("application/json") else content.decode()
    return response.status, found, {k.lower(): v for k, v in response.headers.items()}


def post(port: int, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    status, found, _ = call(port, "POST", path, body, **headers)
    return status, found


def named_events(text: str) -> list[dict[str, Any]]:
    """Return the bodies of a stream of events whose names are the types of their bodies."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = block.removeprefix("event: ").partition("\ndata: ")
        found.append(json.loads(data))
        assert found[-1]["type"] == name
    return found


def events(text: str) -> list[dict[str, Any]]:
    """Return the bodies of a stream of events."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
