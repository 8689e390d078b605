"""Masks of the tokens that a grammar allows, for ``Engine.submit(grammar=)``: by llguidance.

llguidance follows a grammar by the bytes of tokens. Compiling takes a millisecond for a usual
schema, as states are made when they are first met.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import check_int, install_hint, type_error
from lmdecode.serving import grammar_source
from lmdecode.serving.gbnf import lark_of_gbnf
from lmdecode.serving.grammar_source import GrammarSource, check_lark, check_text

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarState"]

_OP, _STATE = "GrammarCompiler", "GrammarState.accept_token"
_MAX_MESSAGE = 160  # characters of the compiler's messages
_STACK = 64 << 20  # bytes; the compiler is recursive
_stack_lock = threading.Lock()


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(f"grammars need the package llguidance: {install_hint('serve')}") from (
            error
        )
    return llguidance


class GrammarState:
    """A grammar on the way through one text: what ``Engine.submit`` takes as ``grammar``.

    Where the grammar is complete, the end tokens are allowed, and they alone where nothing may
    follow.
    """

    def __init__(self, matcher: Any, grammar: CompiledGrammar) -> None:
        self._matcher, self._grammar = matcher, grammar
        self._words, self._ends = grammar.words, grammar.eos_token_ids
        self._has_ended = False

    def fill_bitmask(self, bitmask: Tensor) -> None:
        """Write the allowed next tokens into a contiguous [ceil(V / 32)] int32 of the CPU.

        Bit t % 32 of word t // 32 is set for token t. Raises ValueError for another tensor, and
        RuntimeError where the grammar needs too much memory or time from here on.
        """
        if self._has_ended:
            bitmask.zero_()
            for token in self._ends:
                bitmask[token // 32] |= _BIT[token % 32]
            return
        is_right = bitmask.dtype == torch.int32 and bitmask.shape == (self._words,)
        if not is_right or bitmask.device.type != "cpu" or not bitmask.is_contiguous():
            raise ValueError(
                f"GrammarState.fill_bitmask: bitmask is {bitmask.dtype} {list(bitmask.shape)}; "
                f"expected int32 [{self._words}] without gaps, of the CPU"
            )
        self._matcher.unsafe_compute_mask_ptr(bitmask.data_ptr(), self._words * 4)
        self._check("has no next token")

    def accept_token(self, token: int) -> None:
        """Advance by a token.

        Raises ValueError if the grammar does not allow it here, TypeError if it is no int, and
        RuntimeError where the grammar needs too much memory or time from here on.
        """
        token = check_int(_STATE, "token", token, 0, self._grammar.vocab_size - 1)
        if token in self._ends and (self._has_ended or self._matcher.is_accepting()):
            self._has_ended = True
            return
        is_allowed = not self._has_ended and self._matcher.validate_tokens([token]) == 1
        if not is_allowed or not self._matcher.consume_token(token):
            self._check(f"does not take token {token}")
            raise ValueError(f"the grammar does not take token {token} here")

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        return self._has_ended or bool(self._matcher.is_accepting())

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            reason = self._matcher.stop_reason()
            error = ValueError if reason in ("NoExtension", "NotStopped") else RuntimeError
            # A text alone has too many ways to go on; the other limits are the shared lexer's.
            self._grammar.is_spent |= error is RuntimeError and reason != "ParserTooComplex"
            raise error(f"the grammar {what}: {_one_line(self._matcher.get_error())}")


_BIT = [1 << bit for bit in range(31)] + [-(1 << 31)]


class CompiledGrammar:
    """A grammar that any number of texts may follow; ``GrammarCompiler`` makes it.

    ``vocab_size`` is V and ``words`` ceil(V / 32). ``is_spent``: a text reached a limit. Texts
    share the states of llguidance's lexer, so the others fail there as well: the next ones need the
    grammar compiled anew.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher, self.eos_token_ids = matcher, eos_token_ids
        self.vocab_size, self.words = vocab_size, -(-vocab_size // 32)
        self.is_spent = False
        self._lock = threading.Lock()

    def start(self) -> GrammarState:
        """Return a state at the beginning, for one request."""
        with self._lock:
            matcher = self._matcher.deep_copy()
        return GrammarState(matcher, self)


class GrammarCompiler:
    """Compiles grammars for a tokenizer, and keeps the last ``max_cached``. Any thread may use it.

    ``vocab_size`` is V, the size of the model's logits; tokens that the tokenizer does not have are
    forbidden. Raises ImportError without the package ``llguidance`` (``pip install
    "lmdecode[serve]"``), and ValueError or TypeError for arguments that do not fit.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        max_cached: int = 64,
    ) -> None:
        self._vocab = check_int(_OP, "vocab_size", vocab_size, 1, 1 << 24)
        self._max_cached = check_int(_OP, "max_cached", max_cached, 1)
        ends = [check_int(_OP, "eos_token_ids", t, 0, self._vocab - 1) for t in eos_token_ids]
        if not ends:
            raise ValueError(f"{_OP}: eos_token_ids is empty; expected at least one token")
        self._ends = frozenset(ends)
        self._module, self._words = _llguidance(), tokenizer
        # A step of the parser that takes 14 ms is an error of its request.
        self._limits = self._module.LLParserLimits(
            initial_lexer_fuel=200_000, max_lexer_states=50_000, verbose_errors=False
        )
        self._cache: OrderedDict[tuple[GrammarSource, str], Future[CompiledGrammar]] = OrderedDict()
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._made: tuple[Any, list[int]] | None = None

    @property
    def _tokenizer(self) -> tuple[Any, list[int]]:
        """The tokenizer as llguidance has it, and the tokens that are no text.

        Made when it is first needed: it takes long.
        """
        with self._making:
            if self._made is None:
                ends = sorted(self._ends)
                words = _Words(self._words, self._vocab, ends)
                tokenizer = self._module.LLTokenizer(words, eos_token=ends)
                self._made = tokenizer, words.special_token_ids
        return self._made

    def json_object(self) -> CompiledGrammar:
        """Return the grammar of any JSON object."""
        return self.compile(grammar_source.json_object())

    def json_schema(self, schema: Any, *, strict: bool = True) -> CompiledGrammar:
        """Return the grammar of JSON that a schema allows; see ``schema_text``."""
        return self.compile(grammar_source.json_schema(schema, strict=strict))

    def regex(self, pattern: str) -> CompiledGrammar:
        """Return the grammar of a regular expression, which the whole text matches.

        It is one of Rust's crate ``regex``, without look-around and back references.
        """
        return self.compile(GrammarSource("regex", _as_str("pattern", pattern)))

    def lark(self, text: str) -> CompiledGrammar:
        """Return a grammar in llguidance's dialect of Lark, whose first rule is ``start``."""
        return self.compile(GrammarSource("lark", _as_str("text", text)))

    def gbnf(self, text: str) -> CompiledGrammar:
        """Return a grammar in GBNF, llama.cpp's, whose first rule is ``root``."""
        return self.compile(GrammarSource("gbnf", _as_str("text", text)))

    def choice(self, choices: Sequence[str]) -> CompiledGrammar:
        """Return the grammar of some texts."""
        return self.compile(grammar_source.choice(choices))

    def compile(self, source: GrammarSource, *, prefix: str = "") -> CompiledGrammar:
        """Return a compiled grammar, which may be a cached one.

        ``prefix`` has rules of Lark, one of them ``prefix``, for the text before the grammar's: see
        ``ReasoningFormat.grammar_prefix``. Raises ValueError, in one line, if the grammar is wrong,
        too large, or has a keyword that cannot be kept.
        """
        key = (source, prefix)
        with self._lock:
            found = self._cache.get(key)
            if found is not None and _is_spent(found):
                found = None
            if found is None:
                future = self._cache[key] = Future()
                if len(self._cache) > self._max_cached:
                    self._cache.popitem(last=False)
            else:
                future = found
                self._cache.move_to_end(key)
        if found is None:
            try:
                future.set_result(self._compile(source, prefix))
            except BaseException as error:
                with self._lock:
                    if self._cache.get(key) is future:
                        del self._cache[key]
                future.set_exception(error)
        try:
            return future.result()
        except ValueError as error:  # its own, as several threads may wait for one
            raise type(error)(*error.args) from None

    def _compile(self, source: GrammarSource, prefix: str) -> CompiledGrammar:
        check_text("the grammar", source.text)
        entry = _entry_of(source, self._lark_of_gbnf)
        grammars: list[dict[str, Any]] = [entry]
        if prefix:
            first = f"%llguidance {{}}\nstart: prefix @body\n{prefix}"
            grammars = [{"lark_grammar": first}, {**entry, "name": "body"}]
        text = json.dumps({"grammars": grammars}, ensure_ascii=False)
        return CompiledGrammar(_with_stack(lambda: self._matcher_of(text)), self._vocab, self._ends)

    def _lark_of_gbnf(self, text: str) -> str:
        return lark_of_gbnf(text, self._words.inner.token_to_id, self._vocab, self._tokenizer[1])

    def _matcher_of(self, text: str) -> Any:
        matcher = self._module.LLMatcher(self._tokenizer[0], text, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()  # large terminals are prepared by the first
            copy = matcher.deep_copy()
            copy.compute_bitmask()
            if not copy.is_error():
                return matcher
            matcher = copy
        message = _one_line(matcher.get_error())
        if message in ("", "NoExtension", "NoExtensionBias"):
            message = "the grammar allows no text"
        raise ValueError(message.replace("Unimplemented keys:", "it cannot keep the keywords"))


def _is_spent(compiled: Future[CompiledGrammar]) -> bool:
    is_made = compiled.done() and compiled.exception() is None
    return is_made and compiled.result().is_spent


class _Words:
    """The tokens of a tokenizer as llguidance takes them."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab: int, ends: Sequence[int]) -> None:
        self._inner = tokenizer.inner
        self.eos_token_id = ends[0]
        added = self._inner.get_added_tokens_decoder()
        special = {*tokenizer.special_ids, *ends}
        # Such as <tool_call>: no part of a text even where the tokenizer has it as a word.
        special |= {
            token
            for token, of_token in added.items()
            if of_token.content[:1] + of_token.content[-1:] in ("<>", "[]")
        }
        count = min(vocab, self._inner.get_vocab_size(with_added_tokens=True))
        count = max([count, *(token + 1 for token in added if token < vocab)])
        self.tokens = []
        for token in range(vocab):
            word = b"" if token >= count else tokenizer.token_bytes(token)
            if token in special or not word:
                special.add(token)
                word = word or f"<[{token}]>".encode()
            self.tokens.append(word)
        self.special_token_ids = sorted(token for token in special if token < vocab)

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens of a text that the grammar forces."""
        if isinstance(text, bytes):
            text = text.decode()
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids


def _as_str(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise type_error(_OP, name, value, "str")
    return value


def _entry_of(source: GrammarSource, lark_of_gbnf: Callable[[str], str]) -> dict[str, Any]:
    """Return a grammar as llguidance has it in its list; raise ValueError."""
    kind, text = source
    if kind not in ("json_schema", "regex", "lark", "gbnf", "calls"):
        raise ValueError(f"a grammar is {kind!r:.80}; expected json_schema, regex, lark or gbnf")
    if kind == "json_schema":
        return {"json_schema": json.loads(text)}
    if kind == "regex":
        return json.loads(_llguidance().LLMatcher.grammar_from_regex(text))["grammars"][0]
    if kind == "gbnf":
        return {"lark_grammar": lark_of_gbnf(text)}
    check_lark(text, allows_not=kind == "calls")
    return {"lark_grammar": text}


def _one_line(message: str) -> str:
    """Return the cause that an error tells, as one line."""
    if "oneOf constraints" in message:
        return "it cannot keep oneOf, two of whose schemas may fit one value"
    if "Too many items" in message:
        return "there are too many ways to go on"
    message = message.split("<state>")[0].split("<backtrace>")[0].replace("<non-verbose/>", "")
    message = re.sub(r"; either increase limits\..*", "", message)  # advice for others
    lines = [re.sub(r"^\s*([0-9]+ \|.*|[\^ |]+)$", "", line) for line in message.splitlines()]
    text = " ".join(" ".join(lines).split())  # without a listing of the grammar
    if len(text) > _MAX_MESSAGE:  # it repeats the grammar, and has the reason at its end
        text = f"{text[: _MAX_MESSAGE // 2]} ... {text[5 - _MAX_MESSAGE // 2 :]}"
    return text


def _with_stack(call: Any) -> Any:
    """Return what a call returns, on a thread with a large stack; the interpreter's is the OS's."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # a panic of Rust
            future.set_exception(ValueError(f"the compiler failed: {_one_line(str(error))}"))

    with _stack_lock:
        before = threading.stack_size(_STACK)
        try:
            thread = threading.Thread(target=run, name="lmdecode grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return future.result()
