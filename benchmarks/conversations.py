"""Conversations of an agent on two servers: what a turn computes, and when its first token comes.

    python -m benchmarks.conversations model.gguf --llama-server PATH

Conversations have one system prompt and part behind it; they take turns, and so do the servers.
Each keeps prompts as it does by default; lmdecode has a store, is started again behind the last
turn, and goes on. A server that starts cold then says whether a text is the same.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from benchmarks.report import machine_line
from benchmarks.servers import (
    WORDS,
    Server,
    arguments,
    llama_server,
    lmdecode_server,
    prompt_of,
    streamed,
)

NEW_TOKENS = 24


@dataclass
class Turn:
    """Tokens of a prompt, how many of them were computed, seconds to the first token, a text."""

    prompt: int
    computed: int
    first: float
    text: str


@dataclass
class Conversation:
    """The messages of a conversation with one server, and its turns so far."""

    messages: list[dict[str, str]]
    turns: list[Turn] = field(default_factory=list)

    def ask(self, server: Server, text: str) -> Turn:
        """Have one more turn."""
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "max_tokens": NEW_TOKENS, "temperature": 0.0,
                "ignore_eos": True}  # fmt: skip
        answer, said, usage = asyncio.run(streamed(server, "/v1/chat/completions", body))
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        prompt = usage["prompt_tokens"]
        self.messages.append({"role": "assistant", "content": said})
        self.turns.append(Turn(prompt, prompt - cached, answer.first, said))
        return self.turns[-1]


def row_of(name: str, conversations: list[Conversation]) -> str:
    """Return a server's row: computed tokens and the time of first turns, then of later ones."""
    first = [one.turns[0] for one in conversations]
    later = [turn for one in conversations for turn in one.turns[1:]]
    cells = [
        name,
        ", ".join(f"{turn.computed}" for turn in first),
        ", ".join(f"{turn.first:.2f}" for turn in first),
        f"{statistics.mean(turn.computed for turn in later):.0f}",
        f"{statistics.median(turn.first for turn in later):.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Run the conversations, and print a table."""
    parser = arguments(__doc__, needs_llama=True)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--system", type=int, default=6000, help="tokens of the system prompt")
    parser.add_argument("--context", type=int, default=8192)
    given = parser.parse_args()
    most = str(given.conversations)
    rng = random.Random(0)

    def lmdecode(*more: str) -> AbstractContextManager[Server]:
        slots = ("--max-requests", most, "--context", str(given.context))
        return lmdecode_server(given, *slots, *more)

    context = str(given.conversations * given.context)
    llama = llama_server(given, "-np", most, "-c", context, "--jinja")
    with tempfile.TemporaryDirectory() as folder:
        stored = ("--store", folder)
        with lmdecode(*stored) as ours, llama as theirs:
            system = prompt_of(rng, given.system)
            held = {
                server.name: [
                    Conversation([{"role": "system", "content": system}])
                    for _ in range(given.conversations)
                ]
                for server in (ours, theirs)
            }
            for _ in range(given.turns):
                for number in range(given.conversations):
                    text = " ".join(rng.choices(WORDS, k=30))
                    for server in (ours, theirs):
                        held[server.name][number].ask(server, text)
        print(machine_line(given.threads))
        print("| server | first turns: computed | s | later turns: computed, mean | s, median |")
        print("|---|---|---|---|---|")
        for name, conversations in held.items():
            print(row_of(name, conversations))
        later = [
            statistics.median(turn.first for one in found for turn in one.turns[1:])
            for found in held.values()
        ]
        print(f"first token of later turns, lmdecode / llama-server: {later[0] / later[1]:.2f}")
        one, text = held["lmdecode"][0], " ".join(rng.choices(WORDS, k=30))
        again = Conversation(list(one.messages))
        with lmdecode(*stored) as ours:
            warm = one.ask(ours, text)
        with lmdecode() as ours:
            cold = again.ask(ours, text)
    print(
        f"started again with the store: {warm.computed} of {warm.prompt} tokens, {warm.first:.2f} s"
        f"; cold: {cold.computed}, {cold.first:.2f} s; same text: {warm.text == cold.text}"
    )
    return 0 if warm.text == cold.text else 1


if __name__ == "__main__":
    sys.exit(main())
