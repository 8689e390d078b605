"""``lmdecode``, or ``python -m lmdecode``: the commands of ``lmdecode.cli``, and the demos."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import lmdecode
from lmdecode.cli import add_commands, store
from lmdecode.cli.errors import told

_ELSEWHERE = {
    "store": "look at stored prompts and talks, check them, copy them",
    "demo": "show what the library does on a small model",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command by its arguments; without one, print what is installed.

    The arguments are the process's by default. Returns the exit status: 0, 1 if the command failed,
    2 if the arguments are wrong, 130 if it was interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else "info"
    if name == "store":
        return store(words[1:])
    if name == "demo":
        from lmdecode.demo.__main__ import main as demo

        return demo(words[1:], "lmdecode demo")
    parser = argparse.ArgumentParser(
        prog="lmdecode",
        usage="lmdecode COMMAND ...",
        description="Run language models on this machine.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
        epilog="lmdecode COMMAND --help tells more of a command.",
    )
    parser.add_argument("--version", action="version", version=lmdecode.__version__)
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, prog="lmdecode"
    )
    add_commands(commands, name)
    for command, about in _ELSEWHERE.items():
        commands.add_parser(command, help=about, add_help=False)
    if name not in commands.choices:
        parser.parse_args(words)  # which tells what there is, or what is wrong
        return 2
    # A parser by itself takes options between the others: lmdecode run MODEL --raw PROMPT.
    given = commands.choices[name].parse_intermixed_args(words[1:])
    return told(f"lmdecode {name}", lambda: given.run(given))


if __name__ == "__main__":
    sys.exit(main())
