"""Commands of ``lmdecode``: a module each, with ``add_command(commands)``, loaded when it is named.

A command's function ``run`` takes the arguments and returns the exit status. What it raises of
Python's own errors is a line for the user: see ``lmdecode.cli.errors``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lmdecode.cli.errors import told

__all__ = ["COMMANDS", "add_commands", "store"]

#: What each command does, in the order of ``--help``.
COMMANDS = {
    "info": "what is installed, or what a model is",
    "run": "answer a prompt",
    "chat": "talk with a model, from one day to the next",
    "serve": "serve a model: OpenAI's and Anthropic's APIs, and a page to chat at /",
    "transcribe": "write down what is said in audio files",
    "translate": "translate lines of text",
    "convert": "pack a model's weights once, and save them",
    "verify": "show that a text has the same bits, however it is computed",
    "perplexity": "measure what each format of weights costs a model",
}


def add_commands(commands: argparse._SubParsersAction[Any], name: str) -> None:
    """Add all commands to a parser; only the module of the named one is loaded."""
    for command, about in COMMANDS.items():
        if find_spec(f"lmdecode.cli.{command}") is None:
            continue
        if command == name:
            import_module(f"lmdecode.cli.{command}").add_command(commands)
        else:
            commands.add_parser(command, help=about, add_help=False)


def store(arguments: Sequence[str]) -> int:
    """Run ``lmdecode store``, the tools of ``python -m lmdecode.store``; return the exit status."""

    def run() -> int:
        from lmdecode.store.__main__ import main

        return main(list(arguments), prog="lmdecode store")

    return told("lmdecode store", run)
