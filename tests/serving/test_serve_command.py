"""``lmdecode serve`` as a process: its start, its end, and what a store keeps."""

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.talking import model_with_states
from tests.serving.servers import KJV, call, post
from tests.support.processes import run_python, start_python

pytestmark = pytest.mark.slow
LONG = "And it came to pass in those days, that there went out a decree from the king. " * 6


@contextlib.contextmanager
def command(*options: str, model: Path = KJV) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start the command on a free port; yield the process and the port."""
    words = [sys.executable, "-m", "lmdecode", "serve", str(model), "--port", "0", *options]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert select.select([process.stdout], [], [], 120)[0], "it says where it listens"
        yield process, port_in(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def forked(folder: Path, *options: str, model: Path = KJV) -> Iterator[tuple[BaseProcess, int]]:
    """Start the command as ``command`` does, in a process that has torch loaded."""
    files = [os.devnull, str(folder / "out"), str(folder / "err")]
    Path(files[1]).write_text("")
    process = start_python(["-m", "lmdecode", "serve", str(model), "--port", "0", *options], files)
    try:
        end = time.monotonic() + 120
        while not (line := Path(files[1]).read_text()).endswith("\n"):
            assert process.is_alive() and time.monotonic() < end, Path(files[2]).read_text()
            time.sleep(0.02)
        yield process, port_in(line)
    finally:
        process.kill()
        process.join()


def port_in(line: str) -> int:
    found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
    assert found, line
    return int(found[1])


def body_of(seed: int, **changes: Any) -> dict[str, Any]:
    return {"prompt": LONG, "max_tokens": 12, "seed": seed, "temperature": 0.9, **changes}


def text_of(port: int, body: dict[str, Any]) -> str:
    status, got = post(port, "/v1/completions", body)
    assert status == 200, got
    text: str = got["choices"][0]["text"]
    return text


def test_it_drains_at_sigterm(tmp_path: Path) -> None:
    with command("--name", "kings", "--context", "2048") as (process, port):
        assert call(port, "GET", "/v1/models")[1]["data"][0]["id"] == "kings"
        found: list[str] = []
        long = body_of(3, max_tokens=400, ignore_eos=True)
        threads = [threading.Thread(target=lambda: found.append(text_of(port, long)))
                   for _ in range(3)]  # fmt: skip
        for thread in threads:
            thread.start()
        while call(port, "GET", "/health")[1]["answering"] < 3:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert len(found) == 3 and len(set(found)) == 1 and len(found[0]) > 400
        assert process.wait(30) == 0
        with pytest.raises(OSError):
            call(port, "GET", "/health")


@pytest.mark.parametrize(("grace", "tokens"), [((), 3000), (("--grace", "1"), 3900)])
def test_a_second_sigterm_and_the_end_of_the_grace_period_end_it(
    grace: tuple[str, ...], tokens: int, tmp_path: Path
) -> None:
    with forked(tmp_path, "--context", "4096", *grace) as (process, port):
        body = body_of(3, max_tokens=tokens, ignore_eos=True)

        def ask() -> None:
            with contextlib.suppress(OSError, ValueError):
                call(port, "POST", "/v1/completions", body)

        thread = threading.Thread(target=ask)
        thread.start()
        while not call(port, "GET", "/health")[1]["answering"]:
            time.sleep(0.005)
        process.terminate()
        if not grace:
            time.sleep(0.2)
            assert process.is_alive(), "it finishes what runs"
            process.terminate()
        process.join(20)
        assert not process.is_alive()
        thread.join(20)


@pytest.mark.parametrize("has_states", [False, True])
def test_prompts_survive_kill_9(has_states: bool, tmp_path: Path) -> None:
    store = ("--store", str(tmp_path / "store"), "--store-gb", "0.2")
    model = model_with_states(tmp_path / "model") if has_states else KJV
    with forked(tmp_path, *store, model=model) as (process, port):
        texts = [text_of(port, body_of(seed)) for seed in range(3)]
        first = post(port, "/v1/completions", body_of(9))[1]["usage"]
        end = time.monotonic() + 30  # what was read is written beside the answers
        while time.monotonic() < end:
            stats = call(port, "GET", "/health")[1]["store"]
            if stats["commits"]:
                break
            time.sleep(0.1)
        process.kill()
        process.join(20)
    with forked(tmp_path, *store, model=model) as (process, port):
        got = post(port, "/v1/completions", body_of(0))[1]
        assert got["choices"][0]["text"] == texts[0]
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "from the store"
        assert first["prompt_tokens"] == got["usage"]["prompt_tokens"]
        assert [text_of(port, body_of(seed)) for seed in range(3)] == texts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "99999"], "--port is 99999"), (["--dtype", "int3"], "int3"),
        (["--max-requests", "0"], "--max-requests is 0"), (["--host", "256.1.1.1"], "256.1.1.1"),
        (["--chat-template", "/no/such"], "--chat-template is '/no/such'"),
        (["--cors", "example.com"], "--cors is 'example.com'"),
        (["--cors", "http://example.com/"], "--cors is 'http://example.com/'"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_line(options: list[str], message: str) -> None:
    done = run_python("-m", "lmdecode", "serve", KJV, "--port", "0", *options, timeout=120)
    assert done.returncode in (1, 2), done
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and message in lines[0], done.stderr
    assert not done.stdout


def test_a_model_that_is_not_there() -> None:
    words = [sys.executable, "-m", "lmdecode", "serve", "/no/such/model", "--port", "0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1
    assert "/no/such/model" in done.stderr and json.dumps(done.stdout) == '""'


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="an allocator of Linux")
@pytest.mark.parametrize(("asked", "most"), [(None, 2), ("5", 5)])
def test_threads_share_arenas(asked: str | None, most: int) -> None:
    """What one thread frees another can use: memory stays flat where each request has a grammar."""
    code = """
import ctypes, os, re, tempfile, threading
from lmdecode.cli.serve import _share_arenas

_share_arenas()
libc = ctypes.CDLL("libc.so.6")
libc.fopen.restype, libc.malloc.restype = ctypes.c_void_p, ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes, libc.malloc.argtypes = [ctypes.c_void_p], [ctypes.c_size_t]
everybody = threading.Barrier(8)

def take():
    everybody.wait()
    libc.malloc(1000)
    everybody.wait()

threads = [threading.Thread(target=take) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
with tempfile.NamedTemporaryFile() as found:
    file = libc.fopen(found.name.encode(), b"w")
    libc.malloc_info(0, file)
    libc.fclose(file)
    print(len(re.findall(b"<heap nr", found.read())))
"""
    environment = {name: text for name, text in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    if asked is not None:
        environment["MALLOC_ARENA_MAX"] = asked
    try:
        ctypes.CDLL("libc.so.6").malloc_info  # noqa: B018
    except (AttributeError, OSError):
        pytest.skip("no glibc")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert int(done.stdout) == most


def test_the_context_is_the_models_or_what_memory_holds(tmp_path: Path) -> None:
    with forked(tmp_path, "--memory-gb", "0.01") as (_, port):
        _, got, _ = call(port, "GET", "/v1/models")
        assert got["data"][0]["max_model_len"] == 4096
    for options, message in (
        (("--memory-gb", "0"), "--memory-gb is 0.0; expected 0.001 to 1e+06"),
        (("--memory-gb", "0.001", "--context", "4096"), "--context is 4096, and --memory-gb 0.001"),
    ):
        files = [os.devnull, str(tmp_path / "out"), str(tmp_path / "err")]
        words = ["-m", "lmdecode", "serve", str(KJV), "--port", "0", *options]
        failed = start_python(words, files)
        failed.join(120)
        told = Path(files[2]).read_text()
        assert failed.exitcode == 1 and message in told, told


def test_it_says_what_to_type_and_prints_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tomllib

    from lmdecode.__main__ import main

    def printed(*options: str) -> str:
        assert main(["serve", *options]) == 0
        return capsys.readouterr().out

    monkeypatch.delenv("LMDECODE_API_KEY", raising=False)
    address = "http://127.0.0.1:8000"
    codex = tomllib.loads(printed(str(KJV), "--context", "4096", "--print-config", "codex"))
    provider = {"name": "lmdecode", "base_url": f"{address}/v1", "wire_api": "responses"}
    assert codex == {"model": "model", "model_provider": "lmdecode", "model_context_window": 4096,
                     "model_providers": {"lmdecode": provider}}  # fmt: skip
    claude = printed("--name", "a b", "--port", "81", "--print-config", "claude-code").splitlines()
    assert claude[0] == "export ANTHROPIC_BASE_URL=http://127.0.0.1:81"
    assert "export ANTHROPIC_MODEL='a b'" in claude and claude[-1] == "claude"
    opencode = json.loads(printed("--name", "a", "--print-config", "opencode"))
    assert opencode["model"] == "lmdecode/a" and list(opencode["provider"]["lmdecode"]["models"])
    monkeypatch.setenv("LMDECODE_API_KEY", "s3cret")
    for name in ("codex", "claude-code", "opencode", "open-webui"):
        text = printed("--print-config", name)
        assert "LMDECODE_API_KEY" in text and "s3cret" not in text
        assert name == "open-webui" or "MODEL" in text
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with forked(tmp_path, "--chat-template", str(template), "--name", "kings") as (_, port):
        said = (tmp_path / "out").read_text()
        assert f"ANTHROPIC_BASE_URL=http://127.0.0.1:{port} " in said
        assert f"lmdecode serve --name kings --port {port} --print-config codex" in said


def test_a_model_is_needed_to_serve() -> None:
    from lmdecode.__main__ import main

    assert main(["serve"]) != 0
