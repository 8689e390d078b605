"""The KV store: a process is killed in the middle of two conversations, and they go on."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lmdecode._tables import aligned_table
from lmdecode.cli.errors import one_line
from lmdecode.demo._common import (
    DemoError,
    NotBuiltError,
    bar_chart,
    fastest,
    load_model,
    model_folder,
    print_model,
    quoted,
    require,
    say,
)

# Who speaks when: what the reader says in each turn, after which the model goes on.
CONVERSATIONS = {
    "psalms": ("Psalms 23\nThe LORD is my", "\nPsalms 24\nThe earth is"),
    "genesis": ("Genesis 1\nIn the beginning", "\nGenesis 2\nThus the heavens"),
}
SEED = 2024
CAPACITY_BYTES = 1 << 28
# Each process is a fork of one that has imported transformers, once for all of them.
PROCESSES = multiprocessing.get_context("forkserver")
_IMPORTED = [__name__, "lmdecode.store", "transformers.models.mistral.modeling_mistral"]


def prepare_processes() -> None:
    """Start these imports, which take seconds, in the background."""
    PROCESSES.set_forkserver_preload(_IMPORTED)
    forkserver.ensure_running()


class Words:
    """A streamer that tells of each token of an answer."""

    def __init__(self, on_token: Callable[[], object]) -> None:
        self._on_token = on_token
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then tokens."""
        if not self._is_prompt:
            self._on_token()
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is left."""


def talk(
    model: Any,
    tokenizer: Any,
    folder: Path,
    num_tokens: int,
    on_event: Callable[..., object] = lambda kind, **details: None,
) -> dict[str, list[int]]:
    """Hold both conversations, from wherever the store has them, and return their tokens.

    Answers have ``num_tokens`` tokens, so that the number of tokens tells where a conversation is.
    """
    from lmdecode.integrations.transformers import generate_with_store, sample
    from lmdecode.store import Fingerprint, KVStore

    fingerprint = Fingerprint.from_model(model, tokenizer)
    with KVStore(folder, fingerprint=fingerprint, capacity_bytes=CAPACITY_BYTES) as store:
        said: dict[str, Sequence[int]] = {
            name: store.session(name).tokens for name in CONVERSATIONS
        }
        on_event("found", tokens={name: len(tokens) for name, tokens in said.items()})
        ends = dict.fromkeys(CONVERSATIONS, 0)
        for turn in range(2):
            for name, lines in CONVERSATIONS.items():
                line = tokenizer(lines[turn], add_special_tokens=turn == 0).input_ids
                start, ends[name] = ends[name], ends[name] + len(line) + num_tokens
                tokens = said[name]
                if len(tokens) >= ends[name]:
                    continue  # it was said before the process ended
                if len(tokens) <= start:
                    tokens = [*tokens, *line]
                missing = ends[name] - len(tokens)
                on_event("turn", name=name, number=turn + 1, missing=missing)
                ids = generate_with_store(
                    model, store, name, torch.tensor([tokens]),
                    commit_every=max(1, num_tokens // 8), max_new_tokens=missing,
                    min_new_tokens=missing, do_sample=True, temperature=0.8, top_p=0.9,
                    custom_generate=sample, seed=SEED, streamer=Words(lambda: on_event("token")),
                )  # fmt: skip
                said[name] = ids[0].tolist()
        return {name: list(tokens) for name, tokens in said.items()}


def talk_in_process(folder: Path, store: Path, num_tokens: int, events: Connection) -> None:
    """Talk, and send what happens."""

    def tell(kind: str, **details: object) -> None:
        events.send({"kind": kind, **details})

    torch.set_num_threads(1)  # as the process that starts this one: sums are in the same order
    model, tokenizer = load_model(folder)
    tell("end", tokens=talk(model, tokenizer, store, num_tokens, tell))


_QUICK_TOKENS = 18
_LENGTHS, _QUICK_LENGTHS = (256, 1024, 3968), (256, 1024)


def _watch(
    folder: Path, store: Path, tokens: int, on_event: Callable[[dict[str, Any]], bool]
) -> int:
    """Run the conversations in a process of their own, until ``on_event`` has it killed."""
    events, its_end = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=talk_in_process, args=(folder, store, tokens, its_end))
    process.start()
    its_end.close()  # here, so that the pipe ends with the process
    with events, contextlib.suppress(EOFError):
        while not on_event(events.recv()):
            pass
        process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _interrupt(folder: Path, store: Path, tokens: int) -> None:
    """Kill the process in the middle of the third answer of four."""
    seen = {"turns": 0, "tokens": 0}

    def until_then(event: dict[str, Any]) -> bool:
        if event["kind"] == "turn":
            seen.update(turns=seen["turns"] + 1, tokens=0)
        seen["tokens"] += event["kind"] == "token"
        return seen["turns"] == 3 and seen["tokens"] >= (2 * tokens + 2) // 3

    status = _watch(folder, store, tokens, until_then)
    if status != -signal.SIGKILL:
        raise DemoError(f"the process ended with status {status} before it was killed")
    say(
        f"Two conversations took turns; the process was killed (SIGKILL) in turn {seen['turns']} "
        f"of 4, after {seen['tokens']} of {tokens} tokens."
    )


def _resume(folder: Path, store: Path, tokens: int) -> dict[str, list[int]]:
    """Let another process go on, and return what was said in the end."""
    events: list[dict[str, Any]] = []

    def note(event: dict[str, Any]) -> bool:
        events.append(event)
        return False

    status = _watch(folder, store, tokens, note)
    if status != 0 or not events or events[-1]["kind"] != "end":
        raise DemoError(f"the second process ended with status {status}")
    found = ", ".join(f"{name} with {count}" for name, count in events[0]["tokens"].items())
    missing = [event for event in events if event["kind"] == "turn"]
    say(
        f"Another process found {found} tokens, and computed the {missing[0]['missing']} that "
        f"turn {missing[0]['number']} of {missing[0]['name']!r} lacked, and the rest."
    )
    return events[-1]["tokens"]


def _time_first_token(
    model: Any, tokenizer: Any, folder: Path, ids: list[int], quick: bool
) -> list[tuple[int, float, float]]:
    """Seconds to the first token of prompts of some lengths: computed, and resumed."""
    from lmdecode.integrations.transformers import generate_with_store
    from lmdecode.store import Fingerprint, KVStore

    fingerprint = Fingerprint.from_model(model, tokenizer)
    longest = min(model.config.max_position_embeddings - 1, 1 << 20)
    lengths = [n for n in (_QUICK_LENGTHS if quick else _LENGTHS) if n <= longest]
    text = torch.tensor([(ids * (max(lengths) // len(ids) + 1))[: max(lengths)]])
    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False}
    with KVStore(folder, fingerprint=fingerprint, capacity_bytes=CAPACITY_BYTES) as store:
        for length in lengths:
            generate_with_store(model, store, f"{length}", text[:, :length], **options)
    times = []
    # Only read: nothing is written, and each call finds another session and has to look up.
    with KVStore(folder, fingerprint=fingerprint, readonly=True) as store:
        for length in lengths:
            prompt, turn = text[:, :length], iter(range(1 << 30))

            def resume(prompt: torch.Tensor = prompt, turn: Any = turn) -> object:
                name = f"timing {next(turn) % 2}"
                return generate_with_store(model, store, name, prompt, rewind=True, **options)

            def compute(prompt: torch.Tensor = prompt) -> object:
                mask = torch.ones_like(prompt)
                return model.generate(prompt, attention_mask=mask, **options)

            seconds, rounds, calls = (0.2, 2, 2) if quick else (2.0, 3, 2)
            timing = fastest(
                {"computed": compute, "resumed": resume},
                seconds=seconds, rounds=rounds, min_calls=calls,
            )  # fmt: skip
            times.append((length, timing["computed"], timing["resumed"]))
    return times


def run(model_path: Path | None, plot: Path | None, tokens: int, quick: bool) -> None:
    """Run the demo; DemoError where the text differs from that of uninterrupted conversations."""
    try:
        require("lmdecode.store")
    except DemoError as error:  # no extra has it: it is built where SQLite is
        raise NotBuiltError(one_line(error.__cause__ or error)) from error
    folder = model_folder(model_path)
    tokens = max(3, min(tokens, _QUICK_TOKENS) if quick else tokens)
    model, tokenizer = load_model(folder)
    print_model(folder, model, f"in {str(model.dtype).removeprefix('torch.')}")
    with tempfile.TemporaryDirectory(prefix="lmdecode-demo-") as place:
        expected = talk(model, tokenizer, Path(place, "whole"), tokens)
        _interrupt(folder, Path(place, "killed"), tokens)
        resumed = _resume(folder, Path(place, "killed"), tokens)
        for name in CONVERSATIONS:
            if resumed[name] != expected[name]:
                raise DemoError(
                    f"the resumed conversation differs from the one without a break: {name!r}, "
                    f"{tokenizer.decode(resumed[name])!r}, {tokenizer.decode(expected[name])!r}"
                )
        print("Both are, token for token, the conversations that nobody interrupted:")
        for name in CONVERSATIONS:
            print(f"\n  {name}")
            print(quoted(tokenizer.decode(resumed[name], skip_special_tokens=True)))
        ids = [token for name in CONVERSATIONS for token in resumed[name]]
        times = _time_first_token(model, tokenizer, Path(place, "timing"), ids, quick)
    say(
        "\nTime to the first token of a prompt, computed, and resumed from the store (looked up, "
        "checked, loaded, its last token computed); one thread, CPU time, fastest call:\n"
    )
    rows = [
        [f"{length} tokens", f"{computed * 1e3:.1f}", f"{resumed_in * 1e3:.1f}",
         f"{computed / resumed_in:.1f}x"]
        for length, computed, resumed_in in times
    ]  # fmt: skip
    print(aligned_table(["prompt", "computed ms", "resumed ms", "ratio"], rows))
    if plot is not None:
        bars = {
            "computed": [computed * 1e6 for _, computed, _ in times],
            "resumed": [resumed_in * 1e6 for _, _, resumed_in in times],
        }
        labels = [f"{length} tokens" for length, _, _ in times]
        bar_chart(plot, "Time to the first token of a prompt", labels, bars)
