"""The KV store: a process is killed in the middle of two conversations, and they go on."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lmdecode.cli.errors import one_line
from lmdecode.demo import harness
from lmdecode.demo.harness import DemoError, Look, NotBuiltError, quote, say

# Who speaks when: what the reader says in each turn, after which the model goes on.
CONVERSATIONS = {
    "psalms": ("Psalms 23\nThe LORD is my", "\nPsalms 24\nThe earth is"),
    "genesis": ("Genesis 1\nIn the beginning", "\nGenesis 2\nThus the heavens"),
}
SEED = 2024
CAPACITY_BYTES = 1 << 28
_KILLED_TURN = 3  # of 4
_QUICK_TOKENS = 18
_LENGTHS = (256, 1024, 3968)  # two of them in a quick look
# Each process is a fork of one that has imported transformers, once for all of them.
PROCESSES = multiprocessing.get_context("forkserver")
_IMPORTED = [__name__, "lmdecode.store", "transformers.models.mistral.modeling_mistral"]


def prepare_processes() -> None:
    """Start these imports, which take seconds, in the background."""
    PROCESSES.set_forkserver_preload(_IMPORTED)
    forkserver.ensure_running()


def _killer(tokens: int) -> Any:
    """Return a streamer that ends the process, as ``kill -9`` does, behind so many tokens."""
    number = itertools.count()  # the prompt is the first that is put

    def put(value: torch.Tensor) -> None:
        if next(number) == tokens:
            os.kill(os.getpid(), signal.SIGKILL)

    return SimpleNamespace(put=put, end=lambda: None)


def talk(
    model: Any, tokenizer: Any, folder: Path, num_tokens: int, killed_after: int | None = None
) -> tuple[dict[str, list[int]], str]:
    """Hold both conversations, from wherever the store has them.

    Returns their tokens, and what the store had and lacked. ``killed_after``: of the third answer's
    tokens, of which each has ``num_tokens``, so that the number of tokens tells where it is.
    """
    from lmdecode.integrations.transformers import generate_with_store, sample
    from lmdecode.store import Fingerprint, KVStore

    fingerprint = Fingerprint.from_model(model, tokenizer)
    lacked = ""
    turns = [(turn, name) for turn in range(2) for name in CONVERSATIONS]
    with KVStore(folder, fingerprint=fingerprint, capacity_bytes=CAPACITY_BYTES) as store:
        said = {name: list(store.session(name).tokens) for name in CONVERSATIONS}
        found = ", ".join(f"{name} with {len(tokens)}" for name, tokens in said.items())
        ends = dict.fromkeys(CONVERSATIONS, 0)
        for number, (turn, name) in enumerate(turns, 1):
            line = tokenizer(CONVERSATIONS[name][turn], add_special_tokens=turn == 0).input_ids
            start, ends[name] = ends[name], ends[name] + len(line) + num_tokens
            if len(said[name]) >= ends[name]:
                continue  # it was said before the process ended
            if len(said[name]) <= start:
                said[name] += line
            missing = ends[name] - len(said[name])
            lacked = lacked or f"the {missing} that turn {turn + 1} of {name!r} lacked"
            killer = _killer(killed_after) if killed_after and number == _KILLED_TURN else None
            ids = generate_with_store(
                model, store, name, torch.tensor([said[name]]), max_new_tokens=missing,
                commit_every=max(1, num_tokens // 8), min_new_tokens=missing, do_sample=True,
                temperature=0.8, top_p=0.9, custom_generate=sample, seed=SEED, streamer=killer,
            )  # fmt: skip
            said[name] = ids[0].tolist()
    return said, f"found {found} tokens, and computed {lacked}, and the rest"


def _talk_here(folder: Path, *arguments: Any) -> Any:
    torch.set_num_threads(1)  # as the process that starts this one: sums are in the same order
    return talk(*harness.load_model(folder), *arguments)


def _talked(*arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=PROCESSES) as process:
        return process.submit(_talk_here, *arguments).result()


def _first_tokens(model: Any, tokenizer: Any, folder: Path, ids: list[int], quick: bool) -> Any:
    """Seconds to the first token of prompts of some lengths: computed, and resumed."""
    from lmdecode.integrations.transformers import generate_with_store
    from lmdecode.store import Fingerprint, KVStore

    longest = model.config.max_position_embeddings - 1
    lengths = [length for length in _LENGTHS[: 2 if quick else 3] if length <= longest]
    text = torch.tensor([ids * (max(lengths) // len(ids) + 1)])
    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False}
    about: dict[str, Any] = {"fingerprint": Fingerprint.from_model(model, tokenizer)}
    with KVStore(folder, **about, capacity_bytes=CAPACITY_BYTES) as store:
        for length in lengths:
            generate_with_store(model, store, f"{length}", text[:, :length], **options)
    # Only read: nothing is written, and each call finds another session and has to look up.
    with KVStore(folder, **about, readonly=True) as store:
        names = itertools.cycle(["timing 0", "timing 1"])

        def resume(prompt: torch.Tensor) -> object:
            return generate_with_store(model, store, next(names), prompt, rewind=True, **options)

        def compute(prompt: torch.Tensor) -> object:
            return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

        prompts = {f"{length} tokens": text[:, :length] for length in lengths}
        cases = {
            name: {"computed": partial(compute, prompt), "resumed": partial(resume, prompt)}
            for name, prompt in prompts.items()
        }
        return harness.timed(cases, quick)


def run(look: Look) -> None:
    """Run the demo; DemoError where the text differs from that of uninterrupted conversations."""
    try:
        import lmdecode.store  # noqa: F401
    except ImportError as error:  # no extra has it: it is built where SQLite is
        raise NotBuiltError(one_line(error)) from error
    folder, tokens = harness.model_folder(look.model), max(3, look.up_to(_QUICK_TOKENS))
    model, tokenizer = harness.load_model(folder)
    harness.print_model(folder, model, f"in {str(model.dtype).removeprefix('torch.')}")
    killed_after = (2 * tokens + 2) // 3
    with tempfile.TemporaryDirectory(prefix="lmdecode-demo-") as place:
        expected, _ = talk(model, tokenizer, Path(place, "whole"), tokens)
        try:
            _talked(folder, Path(place, "killed"), tokens, killed_after)
            raise DemoError("the process ended before it was killed")
        except BrokenProcessPool:
            pass
        say(
            "Two conversations took turns; the process was killed (SIGKILL) in turn "
            f"{_KILLED_TURN} of 4, after {killed_after} of {tokens} tokens."
        )
        resumed, told = _talked(folder, Path(place, "killed"), tokens)
        say(f"Another process {told}.")
        for name in CONVERSATIONS:
            whose = "those of the conversation without a break"
            harness.check_equal(resumed[name], expected[name], name, whose)
        print("Both are, token for token, the conversations that nobody interrupted:")
        for name in CONVERSATIONS:
            print(f"\n  {name}")
            quote(tokenizer.decode(resumed[name], skip_special_tokens=True))
        ids = [token for name in CONVERSATIONS for token in resumed[name]]
        timings = _first_tokens(model, tokenizer, Path(place, "timing"), ids, look.quick)
    say(
        "\nTime to the first token of a prompt, computed, and resumed from the store (looked up, "
        "checked, loaded, its last token computed); one thread, CPU time, fastest call:\n"
    )
    harness.print_table(*harness.compared("prompt", timings, "ms"))
