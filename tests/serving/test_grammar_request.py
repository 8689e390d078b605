"""``grammar_of_body``: the fields of OpenAI's API, of vLLM and of llama.cpp."""

import json
from typing import Any

import pytest

from lmdecode.serving.grammar_source import (
    GRAMMAR_FIELDS,
    FieldError,
    choice,
    grammar_field,
    grammar_of_body,
    json_object,
    json_schema,
)

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
