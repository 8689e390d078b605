"""How the second tier is reached: passwords, TLS, sockets, clusters; and where there is none."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from redis_server import Server, redis
from remote_cases import TOKENS, entry_names, filled, remote_stats, wait_for
from store_cases import Open, cache, same

from lmdecode.store import KVStore
from lmdecode.store.__main__ import main


def test_passwords(
    host: Callable[..., KVStore], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(tmp_path / "redis", password="hunter2")
    try:
        url = server.url.replace("//", "//:{}@")
        store = filled(host, url.format("hunter2"))
        assert host(url.format("hunter2")).lookup(TOKENS).num_tokens == 30
        wrong = host(url.format("swordfish"))
        assert wrong.put(TOKENS, cache(TOKENS)) == 30
        wait_for(lambda: remote_stats(wrong)["errors"] > 0)
        assert "swordfish" not in wrong._handle.remote.last_error
        folder = str(Path(store._handle.directory).parent)
        for password in ("hunter2", "swordfish"):
            assert main(["stat", folder, "--remote", url.format(password)]) == 0
        captured = capsys.readouterr()
        assert "remote entries        4 of 4" in captured.out
        assert "remote error          AuthenticationError" in captured.out
        assert f"redis://127.0.0.1:{server.port}/0" in captured.out
        assert "hunter2" not in captured.out + captured.err
        assert "swordfish" not in captured.out + captured.err
        assert main(["stat", folder, "--remote", "redis://:hunter2@host:port/0"]) == 1
        captured = capsys.readouterr()
        assert "Remote" in captured.err and "hunter2" not in captured.out + captured.err
    finally:
        server.kill()


def test_tls(host: Callable[..., KVStore], tmp_path: Path) -> None:
    from shutil import which

    if which("openssl") is None:
        pytest.skip("openssl is not installed: apt-get install openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key,
         "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    from redis_server import free_port

    port = free_port()
    server = Server(
        tmp_path / "redis", "--tls-port", str(port), "--tls-cert-file", str(certificate),
        "--tls-key-file", str(key), "--tls-auth-clients", "no",
    )  # fmt: skip
    try:
        url = f"rediss://localhost:{port}/0"
        filled(host, f"{url}?ssl_ca_certs={certificate}")
        assert host(f"{url}?ssl_ca_certs={certificate}").lookup(TOKENS).num_tokens == 30
        distrustful = host(url, settings={"cool_down": 1000.0})  # the certificate is nobody's
        assert not distrustful.lookup(TOKENS)
        assert "certificate" in distrustful._handle.remote.last_error.lower()
    finally:
        server.kill()


def test_a_unix_socket(host: Callable[..., KVStore], tmp_path: Path) -> None:
    server = Server(tmp_path / "redis", "--unixsocket", str(tmp_path / "socket"))
    try:
        filled(host, f"unix://{tmp_path / 'socket'}")
        assert host(server.url).lookup(TOKENS).num_tokens == 30
    finally:
        server.kill()


def test_a_cluster(host: Callable[..., KVStore], tmp_path: Path) -> None:
    """One node has all slots; it refuses what would be of several."""
    server = Server(tmp_path / "redis", "--cluster-enabled", "yes")
    try:
        client = server.client()
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_for(lambda: "cluster_state:ok" in str(client.execute_command("CLUSTER", "INFO")))
        url = f"redis://127.0.0.1:{server.port}"
        store = filled(host, url, settings={"cluster": True})
        assert remote_stats(store)["entries_written"] == 4 and remote_stats(store)["errors"] == 0
        other = host(url, settings={"cluster": True})
        assert same(other.load(other.lookup(TOKENS)), cache(TOKENS))
        slots = {client.execute_command("CLUSTER", "KEYSLOT", n) for n in entry_names(client)}
        assert slots == {redis.crc.key_slot(name) for name in entry_names(client)}
        server.kill()
        assert other.put([7] * 9, cache([7] * 9)) == 9
        assert not other.lookup([8] * 9)
        wait_for(lambda: remote_stats(other)["available"] == 0)
    finally:
        server.kill()


def test_without_redis_py_the_extra_is_named(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r"lmdecode\[redis\]"):
        open_store(remote="redis://host")
    assert not (tmp_path / "store").exists()


def test_a_reader_has_no_second_tier(open_store: Open) -> None:
    open_store().put(TOKENS, cache(TOKENS))
    with pytest.raises(ValueError, match="readonly"):
        open_store(readonly=True, remote="redis://host")
