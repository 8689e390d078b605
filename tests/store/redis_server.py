"""A Redis server of the tests' own, and what may stand between it and a store."""

import shutil
import socket
import subprocess
import threading
import time
import warnings
from pathlib import Path

import pytest

redis = pytest.importorskip("redis", reason="redis-py is not installed: pip install redis")

from redis.backoff import NoBackoff  # noqa: E402
from redis.retry import Retry  # noqa: E402

INSTALL = "redis-server is not installed: apt-get install redis-server"


def require_server() -> None:
    if shutil.which("redis-server") is None:
        warnings.warn(f"tests of the store's second tier skipped: {INSTALL}", stacklevel=2)
        pytest.skip(INSTALL)


def free_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 55000:  # nodes of a cluster also use the port 10000 above
            return port


class Server:
    """redis-server on a port of its own, without a file on disk."""

    def __init__(self, folder: Path, *options: str, password: str = "") -> None:
        require_server()
        self.port = free_port()
        self.folder, self.options, self.password = folder, options, password
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        """Start it, empty."""
        command = [
            "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--appendonly", "no", "--dir", str(self.folder), *self.options,
        ]  # fmt: skip
        if self.password:
            command += ["--requirepass", self.password]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while self.process.poll() is None:
            try:
                self.client().ping()
                return
            except redis.ConnectionError:
                time.sleep(0.01)
        raise RuntimeError(f"redis-server ended with status {self.process.returncode}")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(
            port=self.port, password=self.password or None, retry=Retry(NoBackoff(), 0)
        )


class Proxy:
    """Passes bytes to a server until it is told to stall, or to let them through by drops."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.mode = "pass"  # "stall": nothing comes back; "drip": a byte now and then
        self.connections = 0
        self.requests = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self.connections += 1
            self._sockets += [client, server]
            for source, target, is_answer in ((client, server, False), (server, client, True)):
                thread = threading.Thread(
                    target=self._copy, args=(source, target, is_answer), daemon=True
                )
                thread.start()

    def _copy(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if not is_answer:
                    self.requests += 1
                while is_answer and self.mode == "stall":
                    time.sleep(0.01)
                if is_answer and self.mode == "drip":
                    for byte in data:
                        target.sendall(bytes([byte]))
                        time.sleep(0.02)
                else:
                    target.sendall(data)
        except OSError:
            pass
        for each in (source, target):
            each.close()

    def close(self) -> None:
        self.mode = "pass"
        for each in [self._listener, *self._sockets]:
            each.close()
