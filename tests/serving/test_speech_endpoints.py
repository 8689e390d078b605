"""Transcriptions by the official client: five formats, streams, translations, errors."""

import io
import json
import threading
import time
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("transformers")
pytest.importorskip("av")

import torch  # noqa: E402

from lmdecode.serving.app import Application  # noqa: E402
from lmdecode.serving.speech import SpeechService  # noqa: E402
from lmdecode.speech.formats import FORMATS  # noqa: E402
from tests.serving.servers import call, serving  # noqa: E402
from tests.speech.models import sound, transcriber  # noqa: E402

NAME = "whisper"


def wav(seconds: float, seed: int = 0) -> bytes:
    samples = (sound(seconds, seed) * 32000).clamp(-32000, 32000).to(torch.int16)
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(16000)
        written.writeframes(samples.numpy().tobytes())
    return file.getvalue()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[int, Application]]:
    app = Application(NAME)
    app.speech = SpeechService(transcriber(), max_waiting=2)
    with serving(app.app) as port:
        yield port, app
    app.speech.close()


@pytest.fixture(scope="module")
def client(served: tuple[int, Application]) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served[0]}/v1", api_key="none",
                       max_retries=0) as client:  # fmt: skip
        yield client


@pytest.fixture(scope="module")
def expected() -> Any:
    """What the Transcriber itself gives."""
    segments, info = transcriber().transcribe(io.BytesIO(wav(1.5)), language="en", temperature=0.5,
                                              seed=3)  # fmt: skip
    return list(segments), info


def ask(client: Any, **options: Any) -> Any:
    options = {"temperature": 0.5, "language": "en", "extra_body": {"seed": 3}, **options}
    return client.audio.transcriptions.create(
        model=NAME, file=("a.wav", wav(1.5), "audio/wav"), **options
    )


@pytest.mark.parametrize("response_format", ["json", "text", "verbose_json", "srt", "vtt"])
def test_formats(client: Any, expected: Any, response_format: Any) -> None:
    got = ask(client, response_format=response_format)
    text = FORMATS[response_format](*expected)
    if response_format in ("text", "srt", "vtt"):
        assert got == text
        return
    fields = json.loads(text)
    assert got.text == fields["text"]
    if response_format == "verbose_json":
        assert got.language == "english" and got.duration == pytest.approx(1.5)
        assert [s.text for s in got.segments] == [s["text"] for s in fields["segments"]]
        assert all(s.end >= s.start for s in got.segments)


def test_words(client: Any) -> None:
    got = ask(client, response_format="verbose_json", timestamp_granularities=["word", "segment"])
    assert "".join(word.word for word in got.words or ()).replace(" ", "") == "".join(
        segment.text for segment in got.segments
    ).replace(" ", "")
    words = got.words
    for segment in got.segments:  # begins and ends with its words
        inside = [w for w in words if segment.start <= w.start <= w.end <= segment.end]
        assert (inside[0].start, inside[-1].end) == (segment.start, segment.end)


def test_a_stream(client: Any) -> None:
    events = list(ask(client, stream=True))
    assert events[-1].type == "transcript.text.done"
    assert "".join(event.delta for event in events[:-1]).strip() == events[-1].text.strip()


def test_a_stream_of_no_sound_is_an_error_at_once(served: tuple[int, Application]) -> None:
    status, got = form(served[0], {"file": b"no sound", "stream": "true"})
    assert status == 400 and got["error"]["param"] == "file"


def test_translations(client: Any) -> None:
    got = client.audio.translations.create(
        model=NAME, file=("a.wav", wav(1.0), "audio/wav"), temperature=0.5
    )
    assert isinstance(got.text, str)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"file": b""}, "file"), ({"file": b"no sound"}, "file"), ({"language": "xx"}, "language"),
        ({"temperature": "2"}, "temperature"), ({"temperature": "x"}, "temperature"),
        ({"response_format": "xml"}, "response_format"), ({"beam_size": "0"}, "beam_size"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]"),
        ({"colour": "red"}, "colour"), ({"stream": "maybe"}, "stream"),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"prompt": "a" * 10_001}, "prompt"),
        ({"chunking_strategy": "auto"}, "chunking_strategy"),
    ],
)  # fmt: skip
def test_wrong_fields(served: tuple[int, Application], fields: dict[str, Any], param: str) -> None:
    status, got = form(served[0], {"file": wav(0.5), "model": NAME, **fields})
    assert status == 400 and got["error"]["param"] == param, got


def form(port: int, fields: dict[str, Any]) -> tuple[int, Any]:
    data = b""
    for name, value in fields.items():
        extra = '; filename="a.wav"' if isinstance(value, bytes) else ""
        content = value if isinstance(value, bytes) else value.encode()
        head = f'--x\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'
        data += head.encode() + content + b"\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    return call(port, "POST", "/v1/audio/transcriptions", data + b"--x--\r\n", **kind)[:2]


def test_other_bodies_and_models(served: tuple[int, Application]) -> None:
    port = served[0]
    path = "/v1/audio/transcriptions"
    assert call(port, "POST", path, {"file": "a"})[0] == 400
    kind = {"Content-Type": "multipart/form-data"}
    assert call(port, "POST", path, b"--x\r\n", **kind)[0] == 400
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    assert call(port, "POST", path, b"--x\r\nContent-", **kind)[0] == 400
    assert form(port, {"file": wav(0.5), "model": "other"})[0] == 404
    status, got = call(port, "POST", "/v1/completions", {"prompt": "a"})[:2]
    assert status == 404 and "speech" in got["error"]["message"]
    assert call(port, "GET", "/health")[1]["status"] == "ok"
    assert call(port, "GET", "/v1/models")[1]["data"][0]["id"] == NAME


def test_more_than_wait_are_refused_and_who_goes_is_forgotten(
    served: tuple[int, Application],
) -> None:
    port, app = served
    with ThreadPoolExecutor(8) as threads:
        works = [
            threads.submit(form, port, {"file": wav(3.0), "temperature": "0.5"}) for _ in range(8)
        ]
        statuses = [work.result()[0] for work in works]
    assert set(statuses) == {200, 429}

    def leave() -> None:
        import socket

        with socket.create_connection(("127.0.0.1", port)) as client:
            data = wav(200.0)
            body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            body += data + b"\r\n--x--\r\n"
            head = (
                "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nContent-Type: "
                f"multipart/form-data; boundary=x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            client.sendall(head.encode() + body)
            end = time.monotonic() + 30
            while app.speech and not app.speech.in_flight and time.monotonic() < end:
                time.sleep(0.01)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    end = time.monotonic() + 60
    while app.speech.in_flight and time.monotonic() < end:
        time.sleep(0.02)
    assert app.speech.in_flight == 0
    assert form(port, {"file": wav(0.5), "temperature": "0.5"})[0] == 200
