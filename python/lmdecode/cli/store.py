"""``lmdecode store``: the tools of ``python -m lmdecode.store``."""

from __future__ import annotations

from collections.abc import Sequence

from lmdecode.cli.errors import told

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the tools with these arguments; return the exit status."""

    def run() -> int:
        from lmdecode.store.__main__ import main as tools

        return tools(list(arguments), prog="lmdecode store")

    return told("lmdecode store", run)
