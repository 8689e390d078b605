"""The KV store: a process is killed in the middle of two conversations, and they go on."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lmdecode.demo._model import load_model, print_model
from lmdecode.demo._output import (
    DemoError,
    NotBuiltError,
    aligned_table,
    bar_chart,
    model_folder,
    one_line,
    quoted,
    require,
    say,
)
from lmdecode.demo._store_talk import (
    CAPACITY_BYTES,
    CONVERSATIONS,
    PROCESSES,
    talk,
    talk_in_process,
)
from lmdecode.demo._timing import fastest

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
    """Run the demo.

    Parameters
    ----------
    model_path
        Folder of a causal language model and its tokenizer; None: the one of the source tree.
    plot
        PNG to write; None: none.
    tokens
        Of each answer.
    quick
        Few tokens, rough timings.

    Raises
    ------
    DemoError
        Something is missing, or the text differs from that of conversations without a break.
    """
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
