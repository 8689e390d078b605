"""``python -m lmdecode.store``: look at stores, check them, copy them, move what they hold."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from lmdecode.store._directory_quota import shrink
from lmdecode.store._files import read_model, remove_store
from lmdecode.store._native import UNLIMITED
from lmdecode.store._remote_tier import remote_report
from lmdecode.store.errors import FingerprintMismatchError, StoreDamagedError, StoreError
from lmdecode.store.fingerprint import Fingerprint
from lmdecode.store.kv_store import KVStore, read_export_head
from lmdecode.store.remote import Remote

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _size(text: str) -> int:
    """A number of bytes, or with a unit of 1024: 65536, 64k, 1.5G."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)", text.strip().lower())
    if found is None or (not found[2] and "." in found[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; expected a number of bytes, or a number with k, M, G or T"
        )
    return int(Decimal(found[1]) * _UNITS[found[2]])


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Look at stores, check them, copy them, move what they hold.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *, chooses: bool = True) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=text)
        found.add_argument("path", metavar="PATH", type=Path, help="directory of the store")
        if not chooses:
            return found
        found.add_argument(
            "--fingerprint",
            metavar="NAME",
            default="",
            help="only the fingerprint whose name, as ls shows it, begins so",
        )
        return found

    listing = command("ls", "list sessions and stored prefixes")
    listing.add_argument("--all", action="store_true", help="every chunk, not each prefix's last")
    stat = command("stat", "show configuration and counters")
    stat.add_argument("--remote", metavar="URL", help="and what a second tier has of the store")
    command("why", "say in what fingerprints differ, which never hit each other")
    command("verify", "read and check every byte; exit 1 on damage")
    collect = command("gc", "drop what has expired, give space back; nothing else may write")
    collect.add_argument("--limit", metavar="SIZE", type=_size,
                         help="evict until all fingerprints take no more (as 1.5G)")  # fmt: skip
    backup = command("backup", "copy the store, while it is used")
    backup.add_argument("destination", metavar="DST", type=Path, help="directory of the copy")
    export = command("export", "write entries and sessions to one file")
    export.add_argument("file", metavar="FILE", type=Path, help="file to write")
    export.add_argument("--session", metavar="ID", help="only this session")
    export.add_argument("--salt", default="", help="tenant of the session")
    remove = command("rm", "erase a session, or whole fingerprints; nothing else may write")
    remove.add_argument("--session", metavar="ID", help="this session, and what only it needs")
    remove.add_argument("--salt", default="", help="tenant of the session")
    remove.add_argument("--remote", metavar="URL", help="the session in a second tier too")
    remove.add_argument("--all", action="store_true", help="all fingerprints")
    load = command("import", "take over what export wrote; nothing else may write", chooses=False)
    load.add_argument("file", metavar="FILE", type=Path, help="file to read")
    load.add_argument("--capacity", metavar="SIZE", type=_size, default=UNLIMITED,
                      help="limit of the store: 5000000, 64k, 1.5G (default: none)")  # fmt: skip
    return parser


def stores_of(path: Path, prefix: str = "") -> list[tuple[Path, Fingerprint]]:
    """Directories of fingerprints in a store's directory."""
    found = []
    for file in sorted(path.glob("*/fingerprint.json")):
        if file.parent.name.startswith(prefix):
            try:
                fingerprint = Fingerprint.decoded(file.read_bytes())
                known: dict[str, Any] = dict(read_model(file.parent))
                found.append((file.parent, replace(fingerprint, **known)))
            except (ValueError, TypeError) as error:
                raise StoreDamagedError(f"{file} is damaged: {error}") from None
    return found


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, where tqdm is installed; else nothing."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda done, total: None
        return
    with tqdm(desc=what, disable=None, leave=False) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report


def _open(folder: Path, fingerprint: Fingerprint) -> KVStore:
    """Open for reading, with whichever layout of values the store has."""
    try:
        return KVStore(folder, fingerprint=fingerprint, readonly=True)
    except FingerprintMismatchError:
        return KVStore(folder, fingerprint=fingerprint, readonly=True, v_layout="row")


def _open_to_write(folder: Path, fingerprint: Fingerprint, remote: str | None = None) -> KVStore:
    with _open(folder, fingerprint) as reader:
        by_column = reader._handle.by_column
    return KVStore(folder, fingerprint=fingerprint, capacity_bytes=UNLIMITED, remote=remote,
                   v_layout="column" if by_column else "row")  # fmt: skip


def _erase_session(store: KVStore, session: str, salt: str) -> bool:
    """Erase it; False: there is none."""
    tenant = store.for_tenant(salt)
    scope = tenant._scope(b"")
    if store._handle.native.read_session(scope, session.encode()) is None:
        return False
    print(f"  session {session} and {tenant.erase(session=session)} entries erased")
    return True


def _remove(arguments: argparse.Namespace, stores: list[tuple[Path, Fingerprint]]) -> None:
    session = arguments.session
    if arguments.all and (session is not None or arguments.fingerprint):
        raise ValueError("rm: --all goes with neither --session nor --fingerprint")
    if session is not None:
        found = False
        for directory, fingerprint in stores:
            print(f"{directory.name}  {fingerprint.title} {fingerprint.dtype}")
            with _open_to_write(arguments.path, fingerprint, arguments.remote) as store:
                found = _erase_session(store, session, arguments.salt) or found
        if not found:
            raise ValueError(f"rm: there is no session {session!r} in {arguments.path}")
        return
    if arguments.remote is not None:
        raise ValueError("rm: --remote goes with --session")
    if not arguments.all and not arguments.fingerprint:
        raise ValueError("rm: expected one of --session, --fingerprint and --all")
    if not arguments.all and len(stores) > 1:
        names = ", ".join(directory.name for directory, _ in stores)
        raise ValueError(f"rm: {arguments.fingerprint!r} begins several fingerprints: {names}")
    for directory, fingerprint in stores:
        remove_store(directory)
        print(f"{directory.name}  {fingerprint.title} {fingerprint.dtype}  removed")


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _list(store: KVStore, every: bool) -> None:
    for name, num_tokens in store.sessions():
        print(f"  session  {num_tokens:>8} tokens  {name}")
    entries = store.entries()
    used = f", used {_time(max(e['used_ms'] for e in entries))}" if entries else ""
    print(f"  {len(entries)} chunks of prefixes, {sum(e['bytes'] for e in entries)} bytes{used}")
    for entry in entries:
        is_last = not every and entry["count"] == store.stats()["chunk_tokens"]
        if is_last and any(e["num_tokens"] > entry["num_tokens"] for e in entries):
            continue
        marks = " pinned" if entry["pinned"] else ""
        if entry["expires_ms"]:
            marks += f" expires {_time(entry['expires_ms'])}"
        print(
            f"  prefix   {entry['num_tokens']:>8} tokens  {entry['key'].hex()[:16]}"
            f"  slot {entry['area']:<6} used {_time(entry['used_ms'])}{marks}"
        )


def _stat(store: KVStore, remote: str | None) -> None:
    fingerprint = store.fingerprint
    for name in fingerprint.__dataclass_fields__:
        print(f"  {name:<21} {getattr(fingerprint, name)}")
    stats = store.stats()
    for name in ("chunk_tokens", "slot_bytes", "entries", "sessions"):
        print(f"  {name:<21} {stats[name]}")
    print(f"  {'stored bytes':<21} {sum(entry['bytes'] for entry in store.entries())}")
    if remote is not None:
        report = remote_report(Remote(url=remote), store.entries(), store._handle.by_column)
        for name, value in report.items():
            print(f"  {name:<21} {value}")


def print_differences(
    stores: list[tuple[Path, Fingerprint]], others: Sequence[tuple[str, Fingerprint]] = ()
) -> None:
    """Print fingerprints, and the fields in which they are not equal; the others have titles."""
    named = [(f"{directory.name}  {one.title}", one) for directory, one in stores]
    named += [(f"{one.name}  {title}", one) for title, one in others]
    for name, _ in named:
        print(name)
    for first, (name, one) in enumerate(named):
        for other_name, other in named[first + 1 :]:
            if one == other:
                continue
            print(f"{name.split()[0]} and {other_name.split()[0]} differ in:")
            for line in one.difference(other).splitlines():
                if line.startswith("*"):
                    print(f"  {line[2:]}")


def _verify(store: KVStore) -> bool:
    with _progress("verify") as progress:
        report = store.verify(progress)
    print(f"  {report.entries} entries, {report.num_bytes} bytes, {report.sessions} sessions")
    for line in report.damage:
        print(f"  damaged: {line}")
    return not report.damage


def _import(arguments: argparse.Namespace) -> None:
    head = read_export_head(arguments.file)
    if head is None:
        raise StoreDamagedError(f"{arguments.file} is no file that export wrote")
    stores = stores_of(arguments.path) if arguments.path.exists() else []
    if stores and all(fingerprint != head.fingerprint for _, fingerprint in stores):
        raise FingerprintMismatchError(
            f"{arguments.file} was made with another fingerprint; the store's and the file's:\n"
            + stores[0][1].difference(head.fingerprint)
        )
    with (
        KVStore(
            arguments.path,
            fingerprint=head.fingerprint,
            capacity_bytes=arguments.capacity,
            v_layout="column" if head.by_column else "row",
            chunk_tokens=head.chunk_tokens,
        ) as store,
        _progress("import") as progress,
    ):
        print(f"{store.import_(arguments.file, progress)} entries are new")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "import":
        _import(arguments)
        return 0
    stores = stores_of(arguments.path, arguments.fingerprint)
    if not stores:
        prefix = arguments.fingerprint
        which = f" whose fingerprint begins with {prefix!r}" if prefix else ""
        raise FileNotFoundError(f"no store in {arguments.path}{which}")
    if arguments.command == "export" and len(stores) > 1:
        names = ", ".join(directory.name for directory, _ in stores)
        raise ValueError(f"one file holds one fingerprint; choose with --fingerprint: {names}")
    if arguments.command == "why":
        print_differences(stores)
        return 0
    if arguments.command == "rm":
        _remove(arguments, stores)
        return 0
    whole = True
    for directory, fingerprint in stores:
        print(f"{directory.name}  {fingerprint.title} {fingerprint.dtype}")
        if arguments.command == "gc":
            with _open_to_write(arguments.path, fingerprint) as store:
                print(f"  {store.gc()} entries dropped")
            continue
        with _open(arguments.path, fingerprint) as store:
            if arguments.command == "ls":
                _list(store, arguments.all)
            elif arguments.command == "stat":
                _stat(store, arguments.remote)
            elif arguments.command == "verify":
                whole = _verify(store) and whole
            elif arguments.command == "backup":
                with _progress("backup") as progress:
                    store.backup(arguments.destination, progress)
            else:
                tenant = store.for_tenant(arguments.salt)
                with _progress("export") as progress:
                    tenant.export(arguments.file, arguments.session, progress=progress)
    if arguments.command == "gc" and arguments.limit is not None:
        taken = shrink(arguments.path.absolute(), arguments.limit)
        print(f"{taken} bytes on the disk")
        return 0 if taken <= arguments.limit else 1
    return 0 if whole else 1


def main(argv: list[str] | None = None, prog: str = "python -m lmdecode.store") -> int:
    """Run a command; 1 where a store is damaged or the command failed."""
    try:
        code = _run(_parser(prog).parse_args(argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (StoreError, OSError, ValueError, ImportError) as error:
        print(f"lmdecode.store: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
