"""``python -m lmdecode.demo``: run the demos."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from lmdecode.cli.errors import told
from lmdecode.demo import beam, g2p, model, sampling, store, window
from lmdecode.demo._common import NotBuiltError, model_folder, pyplot, readable_path, say
from lmdecode.demo.store import prepare_processes

# In the order in which they run. None imports transformers, which takes seconds, before it runs.
_DEMOS: dict[str, tuple[ModuleType, str]] = {
    "model": (model, "a whole model in C++: equal text, tokens a second"),
    "sampling": (sampling, "generate() that samples: equal greedy text, time of a step"),
    "beam": (beam, "generate() with 4 beams: equal results, the beams as a tree"),
    "window": (window, "long prompts and a sliding window: equal text, time, memory"),
    "store": (store, "a process is killed in mid-answer, another one goes on: equal text"),
    "g2p": (g2p, "words to sounds, an encoder-decoder: equal ids, error rates, time"),
}
_ALL = "all"
_NAME = "lmdecode.demo"  # of what errors are of
_QUICK_WORDS = 48  # held-out words of g2p
_EXPLAINED_TOKENS = 5
_PICTURES = (".png", ".svg", ".pdf")


def main(words_given: Sequence[str] | None = None, prog: str = "python -m lmdecode.demo") -> int:
    """Run the demos that the command line names; None: that of the process."""
    # Read when transformers and processes of the demos start: nothing is fetched, and idle threads
    # do not spin.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser = argparse.ArgumentParser(
        prog=prog, description="Run the demos: without a name all of them, in a minute."
    )
    parser.add_argument(
        "demos", nargs="*", metavar="NAME",
        help=f"in full: {', '.join(_DEMOS)}, or {_ALL}; behind g2p, the words to pronounce",
    )  # fmt: skip
    parser.add_argument(
        "--model", type=Path, metavar="DIR",
        help="a causal LM with its tokenizer; of g2p alone, a model of letters to phonemes",
    )  # fmt: skip
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png",
        help="draw timings, the tree of beams, masks, pronunciations or error rates",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="to generate (default 60); not of g2p"
    )
    parser.add_argument(
        "--explain", action="store_true",
        help="of sampling: print what each stage of a sampler leaves of one row of logits, instead",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help="few tokens or words, rough timings, as without a name",
    )  # fmt: skip
    arguments = parser.parse_intermixed_args(words_given)
    tokens: int | None = arguments.tokens
    if tokens is not None and tokens < 1:
        parser.error(f"--tokens is {tokens}; expected at least 1")
    if arguments.explain:
        if arguments.demos != ["sampling"]:
            parser.error("--explain is of sampling alone")
        for option in ("plot", "quick"):
            if getattr(arguments, option):
                parser.error(f"--{option} is not of sampling --explain")
        return told(_NAME, lambda: _explain(arguments.model, tokens or _EXPLAINED_TOKENS))
    names: list[str] = [*_DEMOS] if arguments.demos in ([], [_ALL]) else arguments.demos
    words: list[str] = []
    if "g2p" in arguments.demos:
        end = names.index("g2p") + 1
        names, words = names[:end], names[end:]
    for name in names:
        if name not in _DEMOS:
            parser.error(
                f"there is no demo {name!r}; expected {', '.join(_DEMOS)}, or {_ALL} alone"
            )
    if arguments.plot is not None and arguments.plot.suffix.lower() not in _PICTURES:
        parser.error(f"--plot is {arguments.plot}; expected a name in {', '.join(_PICTURES)}")
    return told(_NAME, lambda: _run(names, words, arguments, tokens or 60))


def _run(names: list[str], words: list[str], arguments: argparse.Namespace, tokens: int) -> int:
    begun = time.perf_counter()
    if arguments.plot is not None:
        pyplot()  # before the parts take their time: it may be missing
    is_first_look = not arguments.demos
    quick = is_first_look or arguments.quick
    if "store" in names:
        prepare_processes()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # calls are timed on one
    try:
        for number, name in enumerate(names, 1):
            part, start = f"[{number}/{len(names)}] {name}:", time.perf_counter()
            demo, about = _DEMOS[name]
            say(f"{part} {about}\n")
            plot = arguments.plot
            if plot is not None and len(names) > 1:
                plot = plot.with_stem(f"{plot.stem}_{name}")
            try:
                if name == "g2p":
                    chosen = arguments.model if len(names) == 1 else None
                    demo.run(chosen, plot, words, _QUICK_WORDS if quick else None)
                else:
                    demo.run(arguments.model, plot, tokens, quick)
            except NotBuiltError as error:
                if len(names) == 1:
                    raise
                say(f"It is left out: {error}")
            say(f"\n{part} {time.perf_counter() - start:.1f} s\n")
    finally:
        torch.set_num_threads(threads)
    if len(names) > 1:
        say(f"All of it: {time.perf_counter() - begun:.0f} s. What was compared is equal.")
    if is_first_look:
        print(_next_steps(arguments.model))
    return 0


def _explain(folder: Path | None, tokens: int) -> int:
    sampling.run_explain(folder, tokens)
    return 0


def _next_steps(folder: Path | None) -> str:
    """Say what to try behind the first look."""
    script = Path(sys.executable).with_name("lmdecode")
    is_on_path = shutil.which("lmdecode") == str(script)
    command = "lmdecode" if is_on_path else readable_path(script)
    return f"""
every part in full   make demo ARGS={_ALL}
talk with the model  {command} chat {readable_path(model_folder(folder))}
test the promises    {command} verify"""


if __name__ == "__main__":
    sys.exit(main())
