"""The table of releases that the tests were run with, as a plugin of pytest.

``python -m pytest -p tests.support.releases --releases FILE`` writes what passed into the row of
the torch and the transformers that are installed.
"""

import datetime
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging import version
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_TRANSFORMERS = version.parse(metadata.version("transformers"))
#: With transformers 5.1 tensors of another shape are left out of quantised models too, and
#: Whisper's pipeline takes short recordings.
BEFORE_5_1 = _TRANSFORMERS < version.parse("5.1")
#: With transformers 5.2 generate() has positions of its own, and GPT-2 attends to any length.
BEFORE_5_2 = _TRANSFORMERS < version.parse("5.2")
#: With transformers 5.3 the interface of caches and of prepare_inputs_for_generation has changed.
BEFORE_5_3 = _TRANSFORMERS < version.parse("5.3")
#: With transformers 5.4 static layers count their tokens.
BEFORE_5_4 = _TRANSFORMERS < version.parse("5.4")
#: With transformers 5.5 layers of a cache have states of convolutions, and the gated norm of
#: Falcon-H1 keeps rows apart.
BEFORE_5_5 = _TRANSFORMERS < version.parse("5.5")
#: With transformers 5.7 byte-pair tokenizers keep the spaces before punctuation.
BEFORE_5_7 = _TRANSFORMERS < version.parse("5.7")
#: With transformers 5.13 the experts of Granite's models have the layout of all others.
BEFORE_5_13 = _TRANSFORMERS < version.parse("5.13")
#: With transformers 5.14 generate() takes ``assistant_ensemble_weight``.
BEFORE_5_14 = _TRANSFORMERS < version.parse("5.14")
#: With transformers 5.15 Jamba reads a weight of Mamba without kernels of CUDA too.
BEFORE_5_15 = _TRANSFORMERS < version.parse("5.15")
#: With transformers 5.18 banned words of one token more than the text count, and a dynamic cache
#: that is reset is empty; before, it keeps zeros.
BEFORE_5_18 = _TRANSFORMERS < version.parse("5.18")
#: With transformers 5.23 the continuous batching that lmdecode takes has come, chat templates see
#: plain values, and penalties pass over the padding of prompts; with 5.21 quantised caches in fp8.
BEFORE_5_23 = _TRANSFORMERS < version.parse("5.23")
#: Of tests whose oracle is ``apply_chat_template``.
PLAIN_MESSAGES = pytest.mark.skipif(
    BEFORE_5_23,
    reason="chat templates of transformers before 5.23 see messages as they are given, thoughts "
    "under one name alone, and another end of a message that goes on",
)
#: Of tests whose penalties ignore other numbers of tokens in each row.
IGNORES_PADDING = pytest.mark.skipif(
    BEFORE_5_23, reason="penalties of transformers before 5.23 ignore one number of tokens"
)
#: Of tests whose caches let go of rejected drafts.
READS_DRAFTS = pytest.mark.skipif(BEFORE_5_3, reason="transformers 5.0 to 5.2 cannot read drafts")
#: Of tests whose prompts are read in parts.
IN_PARTS = pytest.mark.skipif(
    BEFORE_5_3, reason="transformers before 5.3 has no cache, or a wrong mask, for prompts in parts"
)
#: The method of a cache's layers that returns the most tokens.
MAX_LENGTH = "get_max_cache_shape" if BEFORE_5_3 else "get_max_length"


def queries(count: int) -> int | torch.Tensor:
    """Return new tokens as ``get_mask_sizes`` of a layer takes them."""
    return torch.arange(count) if BEFORE_5_3 else count


def needs_type(model_type: str) -> None:
    """Skip the test that calls this where transformers has no such models that lmdecode takes."""
    release = f"transformers {metadata.version('transformers')}"
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"{release} has no {model_type}")
    if BEFORE_5_13 and model_type.startswith("granitemoe"):
        pytest.skip(f"{release} has {model_type} with another layout of experts")


def needs_rows_apart(model_type: str, variant: str) -> None:
    """Skip the test that calls this where the model of transformers mixes the rows of a batch."""
    if BEFORE_5_5 and model_type == "falcon_h1" and variant.startswith("norm"):
        pytest.skip("the gated norm of Falcon-H1 before transformers 5.5 mixes rows up")


def needs_rope_type(rope_type: str) -> None:
    """Skip the test that calls this where transformers has no such rotary embeddings yet."""
    if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
        release = f"transformers {metadata.version('transformers')}"
        pytest.skip(f"{release} has no rope_type {rope_type!r}")


HEAD = """# Releases

`make test-newest` and `make test-oldest` write their rows: the Python tests that are not slow, on a
CPU, with the compiled libraries of one build.

| torch | transformers | passed | failed | skipped | date |
|---|---|---|---|---|---|
"""
ROW = re.compile(r"^\| \d.* \|$", re.MULTILINE)


def rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of a table of releases."""
    return [row.strip("| ").split(" | ") for row in ROW.findall(text)]


def with_row(text: str, row: list[str]) -> str:
    """Return the table with a row instead of the one of the same releases, oldest first."""
    others = [other for other in rows(text) if other[:2] != row[:2]]

    def age(cells: list[str]) -> list[list[int]]:
        return [[int(part) for part in re.findall(r"\d+", cell)] for cell in cells[:2]]

    lines = sorted([*others, row], key=age)
    return HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--releases", type=Path, help="the table that gets a row")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    path: Path | None = config.getoption("releases")
    if path is None:
        return
    stats = terminalreporter.stats
    counts = [
        sum(len(stats.get(outcome, [])) for outcome in outcomes)
        for outcomes in (("passed",), ("failed", "error"), ("skipped",))
    ]
    releases = [metadata.version(name) for name in ("torch", "transformers")]
    row = [*releases, *(f"{n:,}" for n in counts), f"{datetime.date.today()}"]
    path.write_text(with_row(path.read_text() if path.exists() else "", row))
