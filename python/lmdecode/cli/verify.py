"""``lmdecode verify``: the same text has the same bits, whatever else is done."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import lmdecode
from lmdecode.cli import COMMANDS
from lmdecode.cli.errors import one_line
from lmdecode.cli.options import MODEL_HELP, add_format_options, load_chat_model
from lmdecode.cli.shipped_models import CAUSAL_MODEL, shipped_model
from lmdecode.cli.verify_process import (
    AfterKill,
    ProcessError,
    VerifyPlan,
    after_kill,
    process_facts,
)
from lmdecode.cli.verify_texts import (
    BATCH,
    COMPARED,
    EAGER_ROWS,
    OPS,
    Bits,
    Texts,
    Written,
    bits_of_ops,
    digest,
    eager_bits,
    write_alone,
    write_in_a_batch,
)
from lmdecode.decoding import Decoding
from lmdecode.models.configs import CausalConfig
from lmdecode.models.saved import MANIFEST
from lmdecode.models.weights import CausalLayerWeights, CausalWeights
from lmdecode.serving.text_model import local_path

__all__ = ["add_command"]

#: The longest text that the model is for, and its tokens.
CONTEXT, VOCAB = 2048, 2048
_LAYERS, _SIZE, _HEADS, _KV_HEADS, _HEAD_SIZE, _FFN = 3, 192, 6, 2, 32, 512
_BASE = 10000.0  # of the rotary embedding


def random_model(dtype: str, cache_dtype: str | None = None, seed: int = 0) -> Decoding:
    """Return a model whose layers are as Mistral's, one of them with a window.

    Its weights are the same on every machine with this torch.
    """
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    projected = (_HEADS + 2 * _KV_HEADS) * _HEAD_SIZE
    ones = torch.ones(_SIZE)
    nothing: dict[str, Any] = dict.fromkeys(CausalLayerWeights._fields)
    layers = [
        CausalLayerWeights(**nothing)._replace(
            attention_norm_gamma=ones,
            qkv=weight(projected, _SIZE),
            attention_out=weight(_SIZE, _HEADS * _HEAD_SIZE),
            ffn_norm_gamma=ones,
            ffn_up=weight(_FFN, _SIZE),
            ffn_gate=weight(_FFN, _SIZE),
            ffn_down=weight(_SIZE, _FFN),
        )
        for _ in range(_LAYERS)
    ]
    turns = _BASE ** -(torch.arange(0, _HEAD_SIZE, 2) / _HEAD_SIZE)
    config = CausalConfig(
        num_layers=_LAYERS, model_size=_SIZE, num_heads=_HEADS, num_kv_heads=_KV_HEADS,
        head_size=_HEAD_SIZE, ffn_size=_FFN, vocab_size=VOCAB,
        windows=(None, 64, None), rotary=(0,) * _LAYERS, rotary_scales=(1.0,),
        embedding_scale=_SIZE**0.5,
    )  # fmt: skip
    weights = CausalWeights(
        embedding=weight(VOCAB, _SIZE), positions=None, rotary=(turns,), final_norm_gamma=ones,
        final_norm_beta=None, logits=None, logits_bias=None, layers=layers,
    )  # fmt: skip
    return Decoding(config, weights, dtype=dtype, cache_dtype=cache_dtype)


_LOOKUP = {"prompt_lookup_num_tokens": 8}


def levels_here() -> tuple[str, ...]:
    """Return the CPU levels of this machine and this build, this process's last."""
    own = lmdecode.cpu_capability()
    return (*(level for level in lmdecode.cpu_capabilities() if level != own), own)


class NotChecked(Exception):
    """Why something could not be checked."""


@dataclass(frozen=True)
class CheckedBits:
    """The result of a check: digests, and a digest's name in ``kinds``.

    ``expected`` is None for digests that others are compared with. ``fault`` says what is wrong
    though the bits may be the same.
    """

    bits: Bits
    expected: Bits | None
    kinds: Sequence[str]
    note: str = ""
    fault: str = ""

    @property
    def differing(self) -> list[str]:
        """What has other bits."""
        pairs = zip(self.kinds, self.bits, self.expected or self.bits, strict=True)
        return [kind for kind, bits, expected in pairs if bits != expected]


class Checks:
    """The checks of a model and its texts; results that several lines need are computed once.

    Processes read and write in ``folder``. ``saved`` is the model's folder, where ``Decoding.load``
    takes it.
    """

    def __init__(self, decoding: Decoding, texts: Texts, folder: Path, saved: Path | None) -> None:
        self._decoding, self._texts, self._folder, self._saved = decoding, texts, folder, saved
        self._kinds = [asked.kind for asked in texts.compared]

    def lines(self) -> Iterator[tuple[str, Callable[[], CheckedBits]]]:
        """Yield the name of each line, and its check."""
        yield "alone", lambda: self._found(None, self._alone)
        yield f"in a batch of {BATCH}", lambda: self._found(self._alone.bits, self._batch())
        yield "on one thread", partial(self._on_threads, 1)
        yield "on two threads", partial(self._on_threads, 2)
        yield "with drafts", self._with_drafts
        yield "eager torch, in any batch", self._eagerly
        own, *others = reversed(levels_here())
        yield f"ops at {own}", lambda: CheckedBits(self._ops, None, list(OPS))
        for level in others:
            facts = _once(partial(self._at_level, level))
            yield f"ops at {level}", partial(self._ops_at, facts)
            yield f"alone = in a batch at {level}", partial(self._texts_at, facts)
        around = _once(self._around_a_kill)
        yield "from the store after kill -9", partial(self._after_kill, around)
        yield "with a byte of the store flipped", partial(self._with_a_flip, around)

    def _found(self, expected: Bits | None, *several: Written, **more: str) -> CheckedBits:
        """Return the first bits that differ from the expected ones, else the expected ones."""
        other = next((each for each in several if each.bits != expected), several[0])
        return CheckedBits(other.bits, expected, self._kinds, **more)

    # ---- in this process

    @cached_property
    def _alone(self) -> Written:
        return self._write_alone()

    @cached_property
    def _ops(self) -> Bits:
        return bits_of_ops()

    def _write_alone(self, **options: Any) -> Written:
        return write_alone(self._decoding, self._texts.compared, **options)

    def _batch(self, **options: Any) -> Written:
        return write_in_a_batch(self._decoding, self._texts, **options)

    def _on_threads(self, count: int) -> CheckedBits:
        expected, expected_ops = self._alone.bits, self._ops
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            ops = CheckedBits(bits_of_ops(), expected_ops, list(OPS))
            fault = f"ops differ: {'; '.join(ops.differing)}" if ops.differing else ""
            return self._found(expected, self._write_alone(), self._batch(), fault=fault)
        finally:
            torch.set_num_threads(before)

    def _with_drafts(self) -> CheckedBits:
        """By prompt lookup in a batch; alone by the model itself, which drafts right."""
        batch = self._batch(**_LOOKUP)
        alone = self._write_alone(
            assistant_model=self._decoding, assistant_confidence_threshold=0.0
        )
        note = (
            f"accepted: {batch.accepted} of {batch.drafted} by lookup, "
            f"{alone.accepted} of {alone.drafted} own"
        )
        fault = "" if alone.accepted else "a model's own drafts were not accepted"
        return self._found(self._alone.bits, batch, alone, note=note, fault=fault)

    def _eagerly(self) -> CheckedBits:
        """In ``batch_invariant()``, alone against several at a time, on one thread and on two."""
        sizes, before = (EAGER_ROWS, 5, 2), torch.get_num_threads()
        plain = [eager_bits(rows) for rows in (1, *sizes)]
        others = sum(len(set(bits)) > 1 for bits in zip(*plain, strict=True))
        try:
            with lmdecode.batch_invariant():
                alone, found = eager_bits(1), []
                for threads in (1, 2):
                    torch.set_num_threads(threads)
                    found += [eager_bits(rows) for rows in sizes]
        finally:
            torch.set_num_threads(before)
        return CheckedBits(
            next((bits for bits in found if bits != alone), alone),
            alone,
            [f"row {row}" for row in range(EAGER_ROWS)],
            note=f"plain torch: {others} of {EAGER_ROWS} rows differ",
        )

    # ---- in processes

    @cached_property
    def _plan(self) -> Path:
        """The file of what processes are to write; with it, the model that they load."""
        model = self._saved
        if model is None:
            model = self._folder / "model"
            try:
                self._decoding.save(model)
            except OSError as error:
                raise NotChecked(f"other processes cannot have the model: {error}") from error
        path = self._folder / "plan.json"
        plan = VerifyPlan(
            str(model.absolute()), self._decoding.cache_dtype,
            self._texts.tokens, self._texts.context,
        )  # fmt: skip
        plan.write(path)
        return path

    def _at_level(self, level: str) -> dict[str, Bits]:
        (facts,) = process_facts("level", self._plan, LMDECODE_CPU_CAPABILITY=level)
        return {name: tuple(facts[name]) for name in ("ops", "alone", "batch")}

    def _ops_at(self, facts: Callable[[], dict[str, Bits]]) -> CheckedBits:
        return CheckedBits(facts()["ops"], self._ops, list(OPS))

    def _texts_at(self, facts: Callable[[], dict[str, Bits]]) -> CheckedBits:
        return CheckedBits(facts()["batch"], facts()["alone"], self._kinds)

    def _around_a_kill(self) -> AfterKill:
        try:
            import lmdecode.store  # noqa: F401  # it is built where SQLite is
        except ImportError as error:
            raise NotChecked(str(error)) from error
        fingerprint = self._decoding.fingerprint()
        key_bytes = fingerprint.head_size * fingerprint.torch_dtype.itemsize
        prompts = [asked.prompt for asked in self._texts.compared]
        token_bytes = fingerprint.num_kv_heads * key_bytes
        found = after_kill(self._plan, prompts, token_bytes, self._folder)
        if found is None:
            raise NotChecked("no prompt was stored before the kill")
        return found

    def _after_kill(self, around: Callable[[], AfterKill]) -> CheckedBits:
        found = around()
        whole = _checked(found.whole)
        tokens = sum(len(asked.prompt) for asked in self._texts.compared)
        lost = sum(max(0, n - m) for n, m in zip(found.stored, whole.cached, strict=True))
        return self._found(
            self._alone.bits,
            whole,
            note=f"{sum(whole.cached)} of {tokens} prompt tokens loaded",
            fault=f"{lost} tokens are lost whose write was acknowledged" if lost else "",
        )

    def _with_a_flip(self, around: Callable[[], AfterKill]) -> CheckedBits:
        found = around()
        of = found.damaged
        whole, broken = _checked(found.whole), _checked(found.broken)
        stored, served = found.stored[of], broken.cached[of]
        if whole.cached[of] < stored:
            raise NotChecked("its keys were not found before they were damaged either")
        if served >= stored:
            return self._found(self._alone.bits, broken, fault="damaged keys were loaded")
        note = f"refused: {served} of {stored} prompt tokens loaded"
        return self._found(self._alone.bits, broken, note=note)


def _checked(written: Written | ProcessError) -> Written:
    if isinstance(written, ProcessError):
        raise written
    return written


def _once(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that calls another one once; it raises that one's error each time."""
    outcome: list[Any] = []

    def call() -> Any:
        if not outcome:
            try:
                outcome.append(function())
            except Exception as error:
                outcome.append(error)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return call


# Where no MODEL is given: sums of floats have an order, which could differ.
_DTYPE = "float32"
_TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and "
    "void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face "
    "of the waters. And God said, Let there be light: and there was light."
)
_RANDOM_TOKENS = [(17 * i * i + 5 * i + 3) % VOCAB for i in range(61)]
_WIDTH = 34  # of the names of lines
_ABOUT = f"""\
A digest is of {len(COMPARED)} texts (tokens and log-probabilities; greedy, sampled, beams), or of
what ops (sampling, beams, caches, integer products) give for fixed inputs. Ops have
the same bits at every CPU level; texts have others, as floats are summed otherwise."""


class _Model(NamedTuple):
    """A model, its name, its texts, and its folder if ``Decoding.load`` takes it."""

    decoding: Decoding
    name: str
    texts: Texts
    saved: Path | None


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "verify",
        help=COMMANDS["verify"],
        usage="lmdecode verify [MODEL] [options]",
        description="Write the same texts alone, in a batch, on one thread and on two, with "
        "drafts, at every CPU level, and from a store whose writer was killed, and compare their "
        "bits. Exit status 1: some differ. Without MODEL: the small model of the source tree, or "
        "one of random weights.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add_format_options(parser)
    parser.set_defaults(run=_run, context=None, threads=None, chat_template=None)


def _given_model(given: argparse.Namespace) -> _Model:
    model = load_chat_model(given)
    texts = Texts(model.tokenizer.encode(_TEXT), model.context_length or CONTEXT)
    path = local_path(given.model)
    saved = path if (path / MANIFEST).is_file() else None
    return _Model(model.decoding, str(given.model), texts, saved)


def _model(given: argparse.Namespace) -> _Model:
    """Return the model that is given, or the one of the source tree, or one of random weights."""
    if given.model is not None:
        return _given_model(given)
    given.dtype = given.dtype or _DTYPE
    shipped, why = shipped_model(), "give MODEL for one of yours"
    if shipped is not None:
        given.model = shipped
        try:
            return _given_model(given)._replace(name=str(CAUSAL_MODEL))
        except ImportError as error:
            why = f"{CAUSAL_MODEL} is not used: {one_line(error)}"
    decoding = random_model(given.dtype, given.cache_dtype)
    return _Model(decoding, f"random weights ({why})", Texts(_RANDOM_TOKENS, CONTEXT), None)


class _Lines:
    """Writes a line as each check ends, and counts."""

    def __init__(self) -> None:
        self._same = self._wrong = self._not_checked = 0

    def write(self, name: str, check: Callable[[], CheckedBits]) -> None:
        """Run a check, and write its line."""
        try:
            text = self._text_of(check())
        except NotChecked as error:
            self._not_checked += 1
            text = f"not checked: {one_line(error)}"
        except (ArithmeticError, LookupError, MemoryError, OSError, ProcessError, RuntimeError,
                ValueError) as error:  # fmt: skip
            self._wrong += 1
            text = f"FAILED: {one_line(error)}"
        print(f"{name:<{_WIDTH}}{text}".rstrip(), flush=True)

    def _text_of(self, found: CheckedBits) -> str:
        differing = found.differing
        verdict = f"DIFFERS: {'; '.join(differing)}" if differing else "same"
        if found.fault:
            verdict += f"; WRONG: {found.fault}"
        if differing or found.fault:
            self._wrong += 1
        elif found.expected is None:
            verdict = ""
        else:
            self._same += 1
        note = f" ({found.note})" if found.note else ""
        return f"{digest(found.bits)}  {verdict}{note}"

    def end(self) -> int:
        """Write the last line, and return the exit status."""
        missing = f"; {self._not_checked} not checked" if self._not_checked else ""
        count = self._same + self._wrong
        print(f"{self._same} of {count} comparisons found the same bits{missing}", flush=True)
        return 1 if self._wrong else 0


def _run(given: argparse.Namespace) -> int:
    print(_ABOUT, flush=True)
    model = _model(given)
    formats = (model.decoding.decoder.weight_format, model.decoding.cache_dtype)
    print(f"model: {model.name}; weights {formats[0]}, caches {formats[1]}", flush=True)
    lines = _Lines()
    with tempfile.TemporaryDirectory(prefix="lmdecode-verify-") as folder:
        checks = Checks(model.decoding, model.texts, Path(folder), model.saved)
        for name, check in checks.lines():
            lines.write(name, check)
    return lines.end()
