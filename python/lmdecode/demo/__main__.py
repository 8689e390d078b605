"""``python -m lmdecode.demo``: run the demos."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from lmdecode.cli.errors import told
from lmdecode.demo import beam, g2p, harness, model, sampling, store, window
from lmdecode.demo.harness import Look, say

# In the order in which they run. None imports transformers, which takes seconds, before it runs.
_DEMOS: dict[str, tuple[ModuleType, str]] = {
    "model": (model, "a whole model in C++: equal text, tokens a second"),
    "sampling": (sampling, "generate() that samples: equal greedy text, time of a step"),
    "beam": (beam, "generate() with 4 beams: equal results, the beams as a tree"),
    "window": (window, "long prompts and a sliding window: equal text, time, memory"),
    "store": (store, "a process is killed in mid-answer, another one goes on: equal text"),
    "g2p": (g2p, "words to sounds, an encoder-decoder: equal ids, error rates, time"),
}
_NAMES = f"{', '.join(_DEMOS)}, or all"
_NAME = "lmdecode.demo"  # of what errors are of
_TOKENS, _EXPLAINED_TOKENS = 60, 5
_PICTURES = (".png", ".svg", ".pdf")
_OPTIONS: dict[str, dict[str, object]] = {
    "demos": {"nargs": "*", "metavar": "NAME",
              "help": f"in full: {_NAMES}; behind g2p, the words to pronounce"},
    "--model": {"type": Path, "metavar": "DIR",
                "help": "a causal LM with its tokenizer; of g2p alone, of letters to phonemes"},
    "--plot": {"type": Path, "metavar": "FILE.png", "help": "of beam: draw the tree, too"},
    "--tokens": {"type": int, "metavar": "N",
                 "help": f"to generate (default {_TOKENS}); not of g2p"},
    "--explain": {"action": "store_true",
                  "help": "of sampling: print what each stage of a sampler leaves, instead"},
    "--quick": {"action": "store_true",
                "help": "few tokens or words, rough timings, as without a name"},
}  # fmt: skip


def main(words_given: Sequence[str] | None = None, prog: str = "python -m lmdecode.demo") -> int:
    """Run the demos that the command line names; None: that of the process."""
    # Read when transformers and processes of the demos start: nothing is fetched, and idle threads
    # do not spin.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    about = "Run the demos: without a name all of them, in a minute."
    parser = argparse.ArgumentParser(prog=prog, description=about)
    for name, options in _OPTIONS.items():
        parser.add_argument(name, **options)  # type: ignore[arg-type]
    given = parser.parse_intermixed_args(words_given)
    names: list[str] = [*_DEMOS] if given.demos in ([], ["all"]) else given.demos
    end = names.index("g2p") + 1 if "g2p" in names else len(names)
    names, words = names[:end], names[end:]
    for name in names:
        if name not in _DEMOS:
            parser.error(f"there is no demo {name!r}; expected {_NAMES} alone")
    if given.tokens is not None and given.tokens < 1:
        parser.error(f"--tokens is {given.tokens}; expected at least 1")
    if given.explain and names != ["sampling"]:
        parser.error("--explain is of sampling alone")
    if given.plot is not None and "beam" not in names:
        parser.error("--plot is of beam alone")
    if given.plot is not None and given.plot.suffix.lower() not in _PICTURES:
        parser.error(f"--plot is {given.plot}; expected a name in {', '.join(_PICTURES)}")
    tokens = given.tokens or (_EXPLAINED_TOKENS if given.explain else _TOKENS)
    look = Look(given.model, given.plot, tokens, given.quick or not given.demos, words)
    if given.explain:
        return told(_NAME, lambda: sampling.explain(look))
    return told(_NAME, lambda: _run(names, look, is_first_look=not given.demos))


def _run(names: list[str], look: Look, is_first_look: bool) -> int:
    begun = time.perf_counter()
    if look.plot is not None:
        harness.pyplot()  # before the parts take their time: it may be missing
    if "store" in names:
        store.prepare_processes()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # calls are timed on one
    try:
        for number, name in enumerate(names, 1):
            part, start = f"[{number}/{len(names)}] {name}:", time.perf_counter()
            demo, about = _DEMOS[name]
            say(f"{part} {about}\n")
            is_of_others = name == "g2p" and len(names) > 1  # the model that was chosen
            try:
                demo.run(dataclasses.replace(look, model=None) if is_of_others else look)
            except harness.NotBuiltError as error:
                if len(names) == 1:
                    raise
                say(f"It is left out: {error}")
            say(f"\n{part} {time.perf_counter() - start:.1f} s\n")
    finally:
        torch.set_num_threads(threads)
    if len(names) > 1:
        say(f"All of it: {time.perf_counter() - begun:.0f} s. What was compared is equal.")
    if is_first_look:  # what to try behind it
        script = Path(sys.executable).with_name("lmdecode")
        is_on_path = shutil.which("lmdecode") == str(script)
        command = "lmdecode" if is_on_path else harness.readable_path(script)
        folder = harness.readable_path(harness.model_folder(look.model))
        print("\nevery part in full   make demo ARGS=all")
        print(f"talk with the model  {command} chat {folder}")
        print(f"test the promises    {command} verify")
    return 0


if __name__ == "__main__":
    sys.exit(main())
