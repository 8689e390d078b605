"""Grammars and forced calls in an ``Engine``, with the shipped model, which has seen no JSON."""

import json
from typing import Any

import jsonschema
import pytest

import lmdecode
from lmdecode.serving.grammar import CompiledGrammar, GrammarCompiler
from lmdecode.serving.grammar_source import json_schema
from lmdecode.serving.tokenizer import Tokenizer
from lmdecode.serving.tool_calls import FORMATS
from tests.serving.grammar_cases import KJV, SCHEMAS, TOOLS, compiler_of

PROMPT = "And God said, "
SEEDS = range(5)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(KJV)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return compiler_of()


@pytest.fixture(scope="module")
def decoding() -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(str(KJV), dtype="int8")


def texts_of(
    decoding: lmdecode.Decoding,
    tokenizer: Tokenizer,
    grammars: list[CompiledGrammar],
    rows: int,
    **options: Any,
) -> list[list[str]]:
    """Return the texts of each grammar by the seeds, so many at a time."""
    engine = decoding.engine(max_requests=rows, capacity=512)
    prompt = tokenizer.encode(PROMPT)
    requests = [
        [
            engine.submit(
                prompt, grammar=grammar.start(), seed=seed, temperature=1.0, top_p=0.95,
                max_new_tokens=400, **options,
            )
            for seed in SEEDS
        ]
        for grammar in grammars
    ]  # fmt: skip
    results = [[request.result() for request in of_grammar] for of_grammar in requests]
    assert {result.finish_reason for found in results for result in found} == {"stop"}
    return [[tokenizer.decode(result.tokens) for result in found] for found in results]


def test_schemas_hold_alone_and_beside_others(
    decoding: lmdecode.Decoding, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammars = [compiler.json_schema(schema) for schema in SCHEMAS.values()]
    beside = texts_of(decoding, tokenizer, grammars, rows=16)
    for schema, texts in zip(SCHEMAS.values(), beside, strict=True):
        for text in texts:
            jsonschema.validate(json.loads(text), schema)
    some = grammars[::4]
    assert texts_of(decoding, tokenizer, some, rows=1) == beside[::4]


def checked_calls(name: str, text: str, tokenizer: Tokenizer) -> list[Any]:
    """Return the calls of a text, whose arguments fit their schema."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in TOOLS}
    content, calls = FORMATS[name].with_tokenizer(tokenizer).parse(text, TOOLS)
    assert content is None and calls, text
    for call in calls:
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, schemas[call.name] or {"maxProperties": 0})
    return calls


def test_forced_calls_have_valid_arguments(
    decoding: lmdecode.Decoding, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    # The model, which has seen no calls, ends a text where it is told to, and no list of calls.
    cases = [
        (name, *case)
        for name, format in FORMATS.items()
        for case in (("required", True), ("required", False), (named, False))
        if not (case[1] and format.form.end)
    ]
    grammars = []
    for name, choice, parallel in cases:
        source = FORMATS[name].with_tokenizer(tokenizer).grammar(TOOLS, choice, parallel)
        assert source is not None
        grammars.append(compiler.compile(source))
    found = texts_of(decoding, tokenizer, grammars, rows=16, logit_bias={1: 10.0})
    for (name, choice, parallel), texts in zip(cases, found, strict=True):
        for text in texts:
            calls = checked_calls(name, text, tokenizer)
            assert parallel or len(calls) == 1
            assert choice == "required" or {call.name for call in calls} == {"get_weather"}


def test_a_grammar_that_ends_lets_others_go_on(
    decoding: lmdecode.Decoding, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    engine = decoding.engine(max_requests=3, capacity=64)
    prompt = tokenizer.encode(PROMPT)
    free = engine.submit(prompt, max_new_tokens=12)
    want = free.result().tokens
    odd = engine.submit(prompt, max_new_tokens=12, grammar=compiler.regex("yes|no").start())
    again = engine.submit(prompt, max_new_tokens=12)
    assert tokenizer.decode(odd.result().tokens) in ("yes", "no")
    assert again.result().tokens == want
    source = json_schema(SCHEMAS["enum"])
    assert compiler.compile(source) is compiler.compile(source)
