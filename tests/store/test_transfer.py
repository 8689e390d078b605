"""backup, export, import, verify, and the commands of ``python -m lmdecode.store``."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from store_cases import Open, cache, fingerprint, same

from lmdecode.store import Fingerprint, FingerprintMismatchError, KVStore, StoreDamagedError
from lmdecode.store.__main__ import main
from tests.support.processes import run_python

A, B = list(range(30)), [1, 2, 3, 4]


@pytest.fixture
def filled(open_store: Open) -> Open:
    with open_store() as store:
        for name, tokens in (("a", A), ("b", B)):
            session = store.session(name)
            session.step(tokens)
            session.commit(cache(tokens))
    return open_store


def damage(folder: Path) -> None:
    (slab,) = folder.rglob("slab-00000")
    content = bytearray(slab.read_bytes())
    content[4100] ^= 1
    slab.write_bytes(content)


def test_a_backup_opens_as_a_store(filled: Open, tmp_path: Path) -> None:
    store = filled()
    steps: list[tuple[int, int]] = []
    store.backup(tmp_path / "copy", lambda done, total: steps.append((done, total)))
    assert steps[-1] == (5, 5)
    store.put([99] * 50, cache([99] * 50))
    copy = filled(path=tmp_path / "copy")
    assert copy.session("a").tokens == A
    assert same(copy.load(copy.lookup(A)), cache(A))
    assert not copy.lookup([99])
    with pytest.raises(FileExistsError):
        store.backup(tmp_path / "copy")


def test_a_backup_while_threads_write(filled: Open, tmp_path: Path) -> None:
    size = filled().slot_bytes
    store = filled(path=tmp_path / "busy", capacity_bytes=12 * size)
    store.put(A, cache(A), pin=True)
    writes = [store.put([n] * 20, cache([n] * 20), background=True) for n in range(40)]
    store.backup(tmp_path / "copy")
    for write in writes:
        write.result()
    copy = filled(path=tmp_path / "copy")
    assert not copy.verify().damage
    assert same(copy.load(copy.lookup(A)), cache(A))
    for n in range(40):
        kv = copy.load(copy.lookup([n] * 20))
        assert kv is None or same(kv, cache([n] * kv[0][0].shape[1]))


def test_a_session_moves_to_another_store(filled: Open, tmp_path: Path) -> None:
    store = filled()
    store.export(tmp_path / "one", session="a")
    store.export(tmp_path / "all")
    for name, sessions in (("one", [("a", 30)]), ("all", [("a", 30), ("b", 4)])):
        other = filled(path=tmp_path / f"to-{name}")
        assert other.import_(tmp_path / name) == (4 if name == "one" else 5)
        assert other.import_(tmp_path / name) == 0  # known already
        assert sorted(other.sessions()) == sessions
        assert same(other.load(other.lookup(A)), cache(A))
    with pytest.raises(ValueError, match="no session 'c'"):
        store.export(tmp_path / "none", session="c")


def test_an_import_keeps_a_session_that_went_on(filled: Open, tmp_path: Path) -> None:
    store = filled()
    store.export(tmp_path / "all")
    session = store.session("b")
    session.step([5])
    session.commit(cache([*B, 5]))
    store.import_(tmp_path / "all")
    store.close()
    assert filled().session("b").tokens == [*B, 5]


def test_an_import_of_another_fingerprint_is_refused(filled: Open, tmp_path: Path) -> None:
    filled().export(tmp_path / "all")
    other = filled(path=tmp_path / "other", fingerprint=fingerprint(weights_hash="revised"))
    with pytest.raises(FingerprintMismatchError) as error:
        other.import_(tmp_path / "all")
    line = next(line for line in str(error.value).splitlines() if "weights_hash" in line)
    assert line.startswith("* ") and '"revised"' in line and '"weights"' in line
    assert other.stats()["entries"] == 0


def test_tenants_stay_apart_in_an_import(filled: Open, tmp_path: Path) -> None:
    filled().export(tmp_path / "all")
    other = filled(path=tmp_path / "other", salt="tenant")
    assert other.import_(tmp_path / "all") == 5
    assert not other.lookup(A)
    assert other.for_tenant("").lookup(A)


def test_a_damaged_file_is_refused(filled: Open, tmp_path: Path) -> None:
    filled().export(tmp_path / "all")
    content = bytearray((tmp_path / "all").read_bytes())
    content[9000] ^= 1
    (tmp_path / "bad").write_bytes(content)
    other = filled(path=tmp_path / "other")
    with pytest.raises(StoreDamagedError, match="checksum"):
        other.import_(tmp_path / "bad")
    assert not other.verify().damage


def test_verify_reports_and_drops(filled: Open, tmp_path: Path) -> None:
    damage(tmp_path / "store")
    store = filled()
    report = store.verify()
    assert (report.entries, report.sessions, len(report.damage)) == (5, 2, 1)
    assert not store.verify().damage


def shell(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "lmdecode.store", *arguments)


def test_help() -> None:
    done = shell("--help")
    assert done.returncode == 0
    for command in ("ls", "stat", "verify", "gc", "backup", "export", "import"):
        assert command in done.stdout
    assert "`" not in done.stdout


def test_ls_stat_verify(filled: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with filled():  # beside a writer
        assert main(["ls", str(tmp_path / "store")]) == 0
        listed = capsys.readouterr().out
        assert "30 tokens  a" in listed and "4 tokens  b" in listed
        assert fingerprint().name in listed
        assert main(["stat", str(tmp_path / "store")]) == 0
        assert "weights_hash          weights" in capsys.readouterr().out
        assert main(["verify", str(tmp_path / "store")]) == 0
        assert "5 entries" in capsys.readouterr().out
        assert main(["ls", str(tmp_path / "store"), "--fingerprint", "zz"]) == 1
        assert "whose fingerprint begins with 'zz'" in capsys.readouterr().err


@pytest.mark.slow
def test_verify_exits_1_on_damage(filled: Open, tmp_path: Path) -> None:
    damage(tmp_path / "store")
    done = shell("verify", tmp_path / "store")
    assert done.returncode == 1
    assert "damaged: slot 0" in done.stdout
    index = next((tmp_path / "store").rglob("index.sqlite"))
    index.write_bytes(b"x" * 8192)
    done = shell("verify", tmp_path / "store")
    assert done.returncode == 1
    assert "index.sqlite" in done.stderr and "Traceback" not in done.stderr


def test_commands_move_a_store(
    filled: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "store")
    assert main(["backup", folder, str(tmp_path / "copy")]) == 0
    assert filled(path=tmp_path / "copy").lookup(A).num_tokens == 30
    assert main(["export", folder, str(tmp_path / "file"), "--session", "b"]) == 0
    assert main(["import", str(tmp_path / "new"), str(tmp_path / "file")]) == 0
    with pytest.raises(SystemExit):  # the file says which
        main(["import", str(tmp_path / "new"), str(tmp_path / "file"), "--fingerprint", "x"])
    assert "1 entries are new" in capsys.readouterr().out
    assert filled(path=tmp_path / "new", chunk_tokens=None).session("b").tokens == B
    assert main(["gc", folder]) == 0
    assert filled().lookup(A).num_tokens == 30


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("20480", 20480), ("20k", 20 << 10), ("20K", 20 << 10), ("0.5M", 1 << 19), ("1G", 1 << 30),
     ("2T", 2 << 40)],
)  # fmt: skip
def test_the_import_command_takes_sizes_with_units(
    filled: Open, tmp_path: Path, size: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled().export(tmp_path / "file")
    given: list[object] = []
    import lmdecode.store.__main__ as commands

    class Store(KVStore):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            given.append(options["capacity_bytes"])
            super().__init__(*arguments, **options)

    monkeypatch.setattr(commands, "KVStore", Store)
    assert main(["import", str(tmp_path / "new"), str(tmp_path / "file"), "--capacity", size]) == 0
    assert given == [num_bytes]


@pytest.mark.parametrize("size", ["", "G", "1X", "-1G", "1.5", "1 GB", "nan"])
def test_the_import_command_refuses_what_is_no_size(
    tmp_path: Path, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["import", str(tmp_path / "new"), str(tmp_path / "file"), f"--capacity={size}"])
    assert done.value.code == 2
    text = capsys.readouterr().err
    assert f"{size!r} is no size; expected a number of bytes, or a number with k, M, G" in text


def test_the_import_command_refuses_another_fingerprint(
    filled: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled().export(tmp_path / "file")
    filled(path=tmp_path / "other", fingerprint=fingerprint(dtype="float16")).close()
    assert main(["import", str(tmp_path / "other"), str(tmp_path / "file")]) == 1
    text = capsys.readouterr().err
    assert '* dtype                 "float16"' in text and '"float32"' in text


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc"])
def test_no_store_there(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path)]) == 1
    assert "no store in" in capsys.readouterr().err


def test_fingerprints_round_trip() -> None:
    for one in (fingerprint(), fingerprint(window=(None, 4, 8)), fingerprint(rope={"a": [1.5]})):
        assert Fingerprint.decoded(one.encoded()) == one
        assert Fingerprint.decoded(one.encoded()).name == one.name
    with pytest.raises(ValueError, match="Fingerprint"):
        Fingerprint.decoded(b"{}")
