"""The page of the server in a real browser: a chat that streams, stops, and is there again."""

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.servers import load_model, served

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
]


class Browser:
    """A tab of a headless browser, driven by its protocol for developers."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        self._process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--remote-debugging-port=0", f"--user-data-dir={folder}", "--window-size=1100,800",
             "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        port_file = folder / "DevToolsActivePort"
        end = time.monotonic() + 60
        while not (port_file.is_file() and port_file.read_text().count("\n")):
            assert time.monotonic() < end and self._process.poll() is None
            time.sleep(0.05)
        port = int(port_file.read_text().split()[0])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as found:
            (page,) = [target for target in json.load(found) if target["type"] == "page"]
        path = page["webSocketDebuggerUrl"].split(str(port), 1)[1]
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade"
            f"\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._file = self._socket.makefile("rb")
        while self._file.readline() != b"\r\n":
            pass
        self._count = 0

    def call(self, method: str, **params: Any) -> Any:
        self._count += 1
        data = json.dumps({"id": self._count, "method": method, "params": params}).encode()
        mask = os.urandom(4)
        head = struct.pack("!BBH", 0x81, 0xFE, len(data)) if len(data) > 125 else struct.pack(
            "!BB", 0x81, 0x80 | len(data)
        )  # fmt: skip
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self._socket.sendall(head + mask + masked)
        while True:
            message = json.loads(self._frame())
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]

    def _frame(self) -> bytes:
        data, is_last = b"", False
        while not is_last:
            first, size = struct.unpack("!BB", self._file.read(2))
            is_last = bool(first & 0x80)
            if size == 126:
                (size,) = struct.unpack("!H", self._file.read(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self._file.read(8))
            data += self._file.read(size)
        return data

    def js(self, code: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=code, returnByValue=True,
                           awaitPromise=True)  # fmt: skip
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, code: str, seconds: float = 60.0) -> Any:
        end = time.monotonic() + seconds
        while not (value := self.js(code)):
            assert time.monotonic() < end, code
            time.sleep(0.02)
        return value

    def open(self, address: str) -> None:
        self.call("Page.enable")
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && !!document.getElementById('form')")

    def close(self) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(20)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(load_model("int8")) as port:
        yield port


def send(browser: Browser, text: str) -> None:
    browser.js(f"$('prompt').value = {json.dumps(text)}; $('form').requestSubmit()")


TEXTS = "[...document.querySelectorAll('.message')].map((box) => box.innerText.trim())"


def test_a_chat(browser: Browser, port: int) -> None:
    browser.open(f"http://127.0.0.1:{port}/")
    assert browser.until("$('model').textContent") == "kjv"
    browser.js("$('max_tokens').value = 60; $('seed').value = 3; save()")
    send(browser, "Who is the king?")
    # It streams: there is a part of the answer while the rest is still written.
    browser.until("messages.length === 1 && document.querySelectorAll('.message').length === 2")
    browser.until("messages.length === 2 && !running")
    first = browser.js(TEXTS)
    assert first[0] == "Who is the king?" and len(first[1]) > 20
    assert browser.js("$('speed').textContent").endswith("tokens/s")
    send(browser, "And then?")
    browser.until("messages.length === 4 && !running")
    talk = browser.js(TEXTS)
    assert talk[:2] == first and len(talk) == 4

    browser.call("Page.reload")
    browser.until(f"document.readyState === 'complete' && {TEXTS}.length === 4")
    assert browser.js(TEXTS) == talk, "a talk is there again"
    assert browser.js("$('seed').value") == "3", "and its settings"
    browser.js("$('clear').click()")
    assert browser.js(TEXTS) == [] and browser.js("messages.length") == 0
    send(browser, "Who is the king?")
    browser.until("messages.length === 2 && !running")
    assert browser.js(TEXTS) == first, "the same seed, the same answer"


def test_stop_and_errors(browser: Browser, port: int) -> None:
    browser.open(f"http://127.0.0.1:{port}/")
    browser.js("$('max_tokens').value = ''; $('clear').click()")
    send(browser, "Tell it all.")
    browser.until(f"({TEXTS}[1] || '').length > 20")
    browser.js("$('stop').click()")
    browser.until("!running")
    stopped = browser.js(TEXTS)[1]
    time.sleep(0.3)
    assert browser.js(TEXTS)[1] == stopped and browser.js("messages.length") == 2
    browser.js("$('temperature').value = 999")
    send(browser, "More")
    browser.until("!running && !!document.querySelector('.error')")
    assert "temperature is 999" in browser.js(TEXTS)[-1]
    assert browser.js("messages.at(-1).role") == "user", "a failed answer is no part of the talk"
