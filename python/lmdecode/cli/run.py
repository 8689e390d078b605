"""``lmdecode run``: answer one prompt, and write the answer as it comes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lmdecode.cli import COMMANDS
from lmdecode.cli.answering import answer
from lmdecode.cli.errors import CommandError
from lmdecode.cli.options import (
    add_draft_option,
    add_model_options,
    add_sampling_options,
    capacity_of,
    check_at_least_1,
    drafts_of,
    load_chat_model,
    sampling_of,
)
from lmdecode.serving.text_model import TextModel

__all__ = ["add_command"]

_MAX_TOKENS = 512
_INTERRUPTED = 130


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "run",
        help=COMMANDS["run"],
        usage="lmdecode run MODEL [PROMPT] [options]",
        description="Answer a prompt, by the model's chat template if it has one. Without a "
        "prompt, or with -, it is read from the standard input.",
    )
    add_model_options(parser)
    add_draft_option(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text; -: standard input")
    add_sampling_options(parser, _MAX_TOKENS)
    parser.add_argument("--json-schema", metavar="JSON", help="of the answer; or a file with it")
    parser.add_argument("--raw", action="store_true", help="go on with the text, as it is")
    parser.set_defaults(run=_run)


def _prompt(given: argparse.Namespace) -> str:
    text: str | None = given.prompt
    if text is None or text == "-":
        if sys.stdin.isatty():
            print("Write the prompt; Ctrl-D ends it.", file=sys.stderr)
        text = sys.stdin.buffer.read().decode(errors="replace").rstrip("\n")
    if not text:
        raise CommandError("the prompt is empty; expected a text")
    return text


def _tokens(given: argparse.Namespace, model: TextModel, prompt: str) -> list[int]:
    if given.raw or model.template is None:
        if given.system is not None:
            why = "--raw is given" if given.raw else f"{given.model} has no chat template"
            raise CommandError(f"--system is given; expected none, as {why}")
        ids = model.tokenizer.encode(prompt)
    else:
        messages = [{"role": "user", "content": prompt}]
        if given.system is not None:
            messages.insert(0, {"role": "system", "content": given.system})
        text = model.template.render(messages)
        ids = model.tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise CommandError("the prompt has no tokens; expected a text")
    return ids


def _schema(given: str) -> Any:
    """Return the schema that is written, or that a file has."""
    text = given
    try:
        if not given.lstrip().startswith("{"):
            text = Path(given).expanduser().read_text(encoding="utf-8")
        return json.loads(text)
    except (OSError, RecursionError, ValueError) as error:
        raise CommandError(f"--json-schema: {error}") from error


def _run(given: argparse.Namespace) -> int:
    check_at_least_1(given, "max_tokens")
    schema = None if given.json_schema is None else _schema(given.json_schema)
    prompt = _prompt(given)
    model = load_chat_model(given)
    ids = _tokens(given, model, prompt)
    capacity = capacity_of(given, model)
    if len(ids) >= capacity:
        raise CommandError(f"the prompt has {len(ids)} tokens; expected at most {capacity - 1}")
    count = min(given.max_tokens, capacity - len(ids))
    arguments = {"max_new_tokens": count, **sampling_of(given, model)}
    if schema is not None:
        arguments["grammar"] = _grammar(model, schema)

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    drafts = drafts_of(given, model)
    with model.decoding.engine(max_requests=1, capacity=len(ids) + count, **drafts) as engine:
        found = answer(engine, model, ids, arguments, write, stops=given.stop)
    if not found.text.endswith("\n"):
        print()
    return _INTERRUPTED if found.finish_reason == "cancelled" else 0


def _grammar(model: TextModel, schema: Any) -> Any:
    from lmdecode.serving.grammar import GrammarCompiler

    size = model.decoding.config.vocab_size
    return GrammarCompiler(model.tokenizer, size, model.eos_token_ids).json_schema(schema).start()
