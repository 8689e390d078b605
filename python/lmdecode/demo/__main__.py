"""``python -m lmdecode.demo``: run the demos."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Both are read when the packages are loaded: idle OpenMP threads must not spin, nothing is fetched.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from lmdecode.demo import beam, chat, g2p, model, sampling, store, window
from lmdecode.demo._output import DemoError

_DEMOS = {
    "model": model.run,
    "sampling": sampling.run,
    "beam": beam.run,
    "window": window.run,
    "store": store.run,
}
_NAMES = (*_DEMOS, "g2p")  # g2p has words where the others have a number of tokens
# What each demo is about to do, for the reader.
_PLANS = {
    "model": "runs a whole language model in C++, compares its text, and times generate()",
    "sampling": "generates text with transformers' loop and ours, and times the sampling stage",
    "beam": "searches four prompts, prints the beams as a tree, and times generate()",
    "window": "runs long prompts through a sliding window, and compares time and memory",
    "store": "kills a process in the middle of two conversations, and lets another go on",
    "g2p": "pronounces words with an encoder-decoder, and compares error rates and times",
}
_QUICK_WORDS, _SOME_WORDS = 48, 200  # held-out words where g2p is quick or one of all demos
_CHAT_TOKENS = 256
_EXPLAINED_TOKENS = 5
_PICTURES = (".png", ".svg", ".pdf")


def main(words_given: Sequence[str] | None = None, prog: str = "python -m lmdecode.demo") -> int:
    """Run the demos that the command line names; None: that of the process."""
    parser = argparse.ArgumentParser(prog=prog, description="Run the demos.")
    parser.add_argument(
        "demos", nargs="*", metavar="NAME",
        help=f"of {', '.join(_NAMES)}; none: all; behind g2p, the words to pronounce; or chat, "
        "which talks with the model",
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
        "--tokens", type=int, help="to generate in model, sampling and beam (default 60), or in an "
        f"answer of chat (default {_CHAT_TOKENS})",
    )  # fmt: skip
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="of chat: where talks are kept (default: in the "
        "user's cache)",
    )  # fmt: skip
    parser.add_argument("--session", help="of chat: the name of the talk (default chat)")
    parser.add_argument("--dtype", help="of chat: the weights (default int8)")
    parser.add_argument(
        "--explain", action="store_true",
        help="of sampling: print what each stage of a sampler leaves of one row of logits, instead",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few tokens or words, rough timings")
    arguments = parser.parse_intermixed_args(words_given)
    tokens: int | None = arguments.tokens
    if tokens is not None and tokens < 1:
        parser.error(f"--tokens is {tokens}; expected at least 1")
    is_chat = arguments.demos == ["chat"]
    for option in ("plot", "quick") if is_chat else ("store", "session", "dtype"):
        if getattr(arguments, option):
            whose = "not of chat" if is_chat else "of chat alone"
            parser.error(f"--{option} is {whose}")
    if arguments.explain:
        if arguments.demos != ["sampling"]:
            parser.error("--explain is of sampling alone")
        for option in ("plot", "quick"):
            if getattr(arguments, option):
                parser.error(f"--{option} is not of sampling --explain")
        return _told(lambda: sampling.run_explain(arguments.model, tokens or _EXPLAINED_TOKENS))
    if is_chat:
        session, count = arguments.session or "chat", tokens or _CHAT_TOKENS
        return _told(
            lambda: chat.run(arguments.model, arguments.store, session, arguments.dtype, count)
        )
    names: list[str] = arguments.demos or [*_NAMES]
    words: list[str] = []
    if "g2p" in arguments.demos:
        end = names.index("g2p") + 1
        names, words = names[:end], names[end:]
    for name in names:
        if name == "chat":
            parser.error("chat is given beside others; expected it alone")
        if name not in _NAMES:
            parser.error(f"there is no demo {name!r}; expected {', '.join(_NAMES)}, or chat alone")
    if arguments.plot is not None and arguments.plot.suffix.lower() not in _PICTURES:
        parser.error(f"--plot is {arguments.plot}; expected a name in {', '.join(_PICTURES)}")
    if len(names) > 1:
        print(f"{len(names)} demos run one after the other, each beside transformers:", flush=True)
        print("\n".join(f"  {name:8}  {_PLANS[name]}" for name in names), flush=True)
    return _told(lambda: _run(names, words, arguments, tokens or 60))


def _told(run: Callable[[], None]) -> int:
    """Run, and return the exit status; an error of a demo is a line."""
    try:
        run()
    except DemoError as error:
        print(f"lmdecode.demo: {error}", file=sys.stderr)
        return 1
    return 0


def _run(names: list[str], words: list[str], arguments: argparse.Namespace, tokens: int) -> None:
    for name in names:
        plot = arguments.plot
        if len(names) > 1:
            print(f"{os.linesep}== {name} =={os.linesep}")
            plot = plot and plot.with_stem(f"{plot.stem}_{name}")
        print(f"This demo {_PLANS[name]}.", flush=True)
        if name == "g2p":
            chosen = arguments.model if len(names) == 1 else None
            limit = None if arguments.demos else _SOME_WORDS
            g2p.run(chosen, plot, words, _QUICK_WORDS if arguments.quick else limit)
        else:
            _DEMOS[name](arguments.model, plot, tokens, arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
