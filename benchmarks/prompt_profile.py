"""Where the time of a prompt goes: samples of the processor's time by part of the model.

    python -m benchmarks.prompt_profile bfloat16 [--tokens 512] [--seconds 10]

The model has Qwen2.5-0.5B's shape, 6 layers and random weights; it runs with one thread. Samples
are taken by Linux's ``perf``, in a build with its symbols:

    pip install --config-settings=install.strip=false --no-build-isolation --editable .
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from os import getpid
from pathlib import Path

from benchmarks.report import machine_line, markdown_table
from lmdecode.linear.formats import FORMATS

MODEL = "A, 6 layers"
PARTS = {
    # Each is named by what occurs in its functions' names; the first that does counts.
    "attention": r"::attention::",
    "products": r"\badd_(chain|groups|tiles)|multiply_(few|many)_rows",
    "their ends": r"multiply_panels|\bfinish_(rows|vectors)",
    "rounding of rows": r"\bprepare|rotate_input",
    "norms": r"_norm_|scale_row",
    "rest": "",
}
_LARGE = 1.0  # percent from which a function of the rest is named
_ROW = re.compile(r"\s*([\d.]+)%\s*;\s*(\S+)\s*;\s*\[.\]\s*(.+?)\s*$")


def parts_of(report: Iterable[str]) -> tuple[dict[str, float], list[str]]:
    """Return the percentages of the parts, and the large functions of the rest.

    Parameters
    ----------
    report
        Lines of ``perf report``: percent; file; function.

    Raises
    ------
    ValueError
        If the functions of lmdecode have no names.
    """
    parts, named = dict.fromkeys(PARTS, 0.0), []
    for line in report:
        found = _ROW.match(line)
        if found is None:
            continue
        percent, file, function = float(found[1]), found[2], found[3]
        if file == "_C.so" and function.startswith("0x"):
            raise ValueError(
                "prompt_profile: functions of _C.so have no names; "
                "expected a build with install.strip=false"
            )
        part = next(name for name, pattern in PARTS.items() if re.search(pattern, function))
        parts[part] += percent
        if part == "rest" and percent >= _LARGE:
            named.append(f"{function} {percent:.1f} %")
    return parts, named


def sampled(call: Callable[[], object], seconds: float) -> list[str]:
    """Call again and again for so long; return the lines of ``perf report`` of this process."""
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "perf.data")
        record = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "997", "-p", str(getpid())]
        with subprocess.Popen([*record, "-o", data]) as perf:
            try:
                begin = time.monotonic()
                while time.monotonic() - begin < seconds:
                    call()
            finally:
                perf.send_signal(signal.SIGINT)
        report = ["perf", "report", "-i", data, "--stdio", "-F", "overhead,dso,sym", "-t", ";"]
        done = subprocess.run(report, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"prompt_profile: perf report: {done.stderr.strip()}")
    return done.stdout.splitlines()


def main() -> int:
    """Profile what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prompt_profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dtype", nargs="+", choices=FORMATS, help="formats of the weights")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512], help="of the prompts")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each, sampled")
    arguments = parser.parse_args()
    if shutil.which("perf") is None:
        parser.error("perf is not installed")

    from benchmarks.decoder.whole_model.models import model_folder, prompt
    from benchmarks.decoder.whole_model.ours import LmdecodeEngine

    rows, notes = [], []
    for tokens in arguments.tokens:
        for dtype in arguments.dtype:
            engine = LmdecodeEngine(model_folder(MODEL), dtype, 1, tokens)
            read = prompt(MODEL, tokens)
            engine.prefill(read)
            try:
                parts, named = parts_of(sampled(partial(engine.prefill, read), arguments.seconds))
            except (ValueError, RuntimeError) as error:
                print(error, file=sys.stderr)
                return 1
            rows.append([f"{dtype}, {tokens}", *(f"{share:.1f}" for share in parts.values())])
            if named:
                notes.append(f"Of the rest of {dtype}, {tokens}: {', '.join(named)}.")
    table = markdown_table(["weights, tokens", *PARTS], rows, 1)
    print("\n\n".join([machine_line(1), table, *notes]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
