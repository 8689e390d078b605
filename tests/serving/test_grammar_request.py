"""``grammar_of_body``: the fields of every API; grammars and forced calls in an ``Engine``."""

import json
from typing import Any

import jsonschema
import pytest

import lmdecode
from lmdecode.serving.grammar import CompiledGrammar, GrammarCompiler
from lmdecode.serving.grammar_source import (
    GRAMMAR_FIELDS,
    FieldError,
    choice,
    grammar_field,
    grammar_of_body,
    json_object,
    json_schema,
)
from lmdecode.serving.tokenizer import Tokenizer
from lmdecode.serving.tool_calls import FORMATS
from tests.serving.grammar_cases import KJV, SCHEMAS, TOOLS, compiler_of

SCHEMA = {"type": "array", "items": {"type": "integer"}}
GBNF, LARK = 'root ::= "a"', 'start: "a"'


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None, "grammar": ""}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, json_object()),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, json_schema(SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x",
          "schema": SCHEMA}}}, json_schema(SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": False,
          "schema": SCHEMA}}}, json_schema(SCHEMA, strict=False)),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, json_schema(SCHEMA)),
        ({"response_format": {"type": "grammar", "grammar": GBNF}}, ("gbnf", GBNF)),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, ("regex", "a+")),
        ({"guided_json": SCHEMA}, json_schema(SCHEMA)),
        ({"guided_json": '{"type": "null"}'}, json_schema({"type": "null"})),
        ({"guided_regex": "a+"}, ("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, choice(["a", "b"])),
        ({"guided_grammar": LARK}, ("lark", LARK)),
        ({"guided_grammar": GBNF}, ("gbnf", GBNF)),
        ({"grammar": GBNF}, ("gbnf", GBNF)),
        ({"grammar": "%llguidance {}\nstart: x\nx: /a/"}, ("lark",
          "%llguidance {}\nstart: x\nx: /a/")),
        ({"json_schema": SCHEMA, "response_format": {"type": "text"}}, json_schema(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, json_schema(SCHEMA)),
        ({"structured_outputs": {"choice": ["a"], "regex": None}}, choice(["a"])),
        ({"structured_outputs": {"json_object": True}}, json_object()),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": {}}, None),
    ],
)  # fmt: skip
def test_fields(body: dict[str, Any], want: Any) -> None:
    assert grammar_of_body({"temperature": 1, **body}) == want


def test_objects_may_be_closed_and_have_no_space() -> None:
    """vLLM 0.32.0 has both as options of its engine, by these rules; here a request has them."""
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    odd = {"additionalProperties": {"type": "object"}, "properties": {}}
    schema = {"properties": {"properties": {"anyOf": [inner, odd]}, "c": {"type": "object"}},
              "$defs": {"x": inner}, "items": [inner], "enum": [inner]}  # fmt: skip
    closed = {**inner, "additionalProperties": False}
    wanted = {"properties": {"properties": {"anyOf": [closed, odd]}, "c": {"type": "object"}},
              "$defs": {"x": closed}, "items": [closed], "enum": [inner],
              "additionalProperties": False}  # fmt: skip

    def source(**fields: Any) -> Any:
        return grammar_of_body({"structured_outputs": fields})

    for one in (schema, json.dumps(schema)):
        assert source(json=one, disable_additional_properties=True) == json_schema(wanted)
        assert source(json=one, disable_additional_properties=False) == json_schema(schema)
    tight = source(json=schema, disable_any_whitespace=True)
    assert json.loads(tight.text)["x-guidance"] == {"whitespace_pattern": ""}
    tight = source(json_object=True, disable_any_whitespace=True)
    assert json.loads(tight.text)["x-guidance"] == {"whitespace_pattern": ""}


def test_the_field_is_the_one_that_asks() -> None:
    text = {"response_format": {"type": "text"}, "structured_outputs": {}, "guided_json": None}
    assert grammar_field({**text, "guided_regex": "("}) == "guided_regex"
    assert grammar_field(text) is None


FORMAT = "response_format"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({FORMAT: 3}, FORMAT, "of type int; expected an object"),
        ({FORMAT: {}}, f"{FORMAT}.type", "is None; expected 'text'"),
        ({FORMAT: {"type": "xml"}}, f"{FORMAT}.type", "is 'xml'"),
        ({FORMAT: {"type": "json_schema"}}, f"{FORMAT}.json_schema", "expected an object"),
        ({FORMAT: {"type": "json_schema", "json_schema": {}}}, f"{FORMAT}.json_schema.schema",
         "is missing"),
        ({FORMAT: {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": 1}}},
         f"{FORMAT}.json_schema.strict", "expected a bool"),
        ({FORMAT: {"type": "json_schema", "json_schema": {"schema": 3}}},
         f"{FORMAT}.json_schema.schema", "the schema is int"),
        ({FORMAT: {"type": "regex"}}, f"{FORMAT}.regex", "of type NoneType; expected a string"),
        ({"guided_json": "{"}, "guided_json", "is no JSON"),
        ({"guided_regex": 3}, "guided_regex", "expected a string"),
        ({"guided_choice": "ab"}, "guided_choice", "expected a list"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"grammar": "\ud800"}, "grammar", "no surrogates"),
        ({"grammar": "a" * 300_000}, "grammar", "at most 262144"),
        ({"structured_outputs": []}, "structured_outputs", "expected an object"),
        ({"structured_outputs": {"odd": 1}}, "structured_outputs.odd", "is unknown"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "a bool"),
        ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": 1}},
         "structured_outputs.disable_additional_properties", "a bool"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs",
         "has json and regex; expected one"),
        ({"guided_json": SCHEMA, "grammar": GBNF}, "grammar", "beside guided_json"),
    ],
)  # fmt: skip
def test_errors_name_the_field(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        grammar_of_body(body)
    assert caught.value.param == param and str(caught.value).startswith(f"{param}: ")
    rest = str(caught.value).removeprefix(f"{param}: ")
    joins = rest.split()[0] in ("is", "has")  # of the field, or a sentence of its own
    assert caught.value.sentence == f"{param}{' ' if joins else ': '}{rest}"


@pytest.mark.parametrize("name", GRAMMAR_FIELDS)
@pytest.mark.parametrize(
    "value",
    [0, 1.5, True, [], {}, [[]], "x", {"type": []}, {"json": {}}, ["a", None], float("nan")],
)
def test_odd_values_are_no_other_error(name: str, value: Any) -> None:
    try:
        grammar_of_body({name: value})
    except FieldError as error:
        assert error.param.startswith(name)


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
    for name, chosen, parallel in cases:
        source = FORMATS[name].with_tokenizer(tokenizer).grammar(TOOLS, chosen, parallel)
        assert source is not None
        grammars.append(compiler.compile(source))
    found = texts_of(decoding, tokenizer, grammars, rows=16, logit_bias={1: 10.0})
    for (name, chosen, parallel), texts in zip(cases, found, strict=True):
        for text in texts:
            calls = checked_calls(name, text, tokenizer)
            assert parallel or len(calls) == 1
            assert chosen == "required" or {call.name for call in calls} == {"get_weather"}


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
