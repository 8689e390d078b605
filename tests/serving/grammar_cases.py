"""JSON schemas, tools, and a random writer that a grammar leads."""

import random
from typing import Any

import torch

from lmdecode.serving.grammar import CompiledGrammar, GrammarCompiler
from lmdecode.serving.tokenizer import Tokenizer
from tests.serving.tokenizer_kinds import KJV

__all__ = ["KJV", "SCHEMAS", "TOOLS", "accepts", "allowed", "compiler_of", "function", "written"]

_NAME = {"type": "string", "maxLength": 8}

SCHEMAS: dict[str, Any] = {
    "object": {"type": "object", "properties": {"a": _NAME}, "required": ["a"],
               "additionalProperties": False},
    "empty object": {"type": "object", "properties": {}, "additionalProperties": False},
    "optional keys": {"type": "object", "properties": {"a": _NAME, "b": {"type": "boolean"},
                      "c": {"type": "null"}}, "additionalProperties": False},
    "enum": {"enum": ["Genesis", "Psalms", 7, None, True]},
    "const": {"const": {"a": [1, 2]}},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer", "minimum": -5, "maximum": 150},
    "exclusive": {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 999},
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{2,5}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "lengths": {"type": "string", "minLength": 5, "maxLength": 9},
    "array": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
              "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [_NAME, {"type": "boolean"}], "items": False,
              "minItems": 2},
    "union": {"anyOf": [_NAME, {"type": "integer", "minimum": 0, "maximum": 9},
                        {"type": "null"}]},
    "types": {"type": ["boolean", "null"]},
    "reference": {"$ref": "#/$defs/node", "$defs": {"node": {
        "type": "object", "properties": {"v": {"enum": [0, 1]}, "next": {"anyOf": [
            {"type": "null"}, {"$ref": "#/$defs/leaf"}]}},
        "required": ["v", "next"], "additionalProperties": False},
        "leaf": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}},
    "all of": {"allOf": [
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        {"type": "object", "properties": {"b": {"enum": ["x", "\u00e9\u4e2d"]}},
         "required": ["b"]}], "additionalProperties": False,
        "properties": {"a": True, "b": True}},
    "nested": {"type": "object", "properties": {"people": {"type": "array", "minItems": 1,
               "maxItems": 2, "items": {"type": "object", "properties": {
                   "name": _NAME, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
                   "required": ["name", "age"], "additionalProperties": False}}},
               "required": ["people"], "additionalProperties": False},
}  # fmt: skip


def function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    """Return a tool as a request has it."""
    found = {"name": name, **more}
    if parameters is not None:
        found["parameters"] = parameters
    return {"type": "function", "function": found}


TOOLS = [
    function("get_weather", {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "hourly": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
            "place": {"type": "object", "properties": {
                "lat": {"type": "integer", "minimum": 0, "maximum": 90}}, "required": ["lat"],
                "additionalProperties": False},
        },
        "required": ["city", "hourly"],
    }),
    function("get"),
]  # fmt: skip


def compiler_of(vocab: int = 4096, **options: Any) -> GrammarCompiler:
    """Return a compiler for the shipped model's tokenizer, whose token 1 ends a text."""
    return GrammarCompiler(Tokenizer.load(KJV), vocab, [1], **options)


def allowed(grammar: Any, vocab: int = 4096) -> list[int]:
    """Return the tokens that a state allows."""
    mask = torch.zeros(-(-vocab // 32), dtype=torch.int32)
    grammar.fill_bitmask(mask)
    bits = (mask[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    found: list[int] = bits.flatten().nonzero()[:, 0].tolist()
    return found


def accepts(
    grammar: CompiledGrammar, tokenizer: Tokenizer, text: str, vocab: int = 4096, end: int = 1
) -> bool:
    """Return whether a grammar allows a text, and a token behind it that ends it."""
    state = grammar.start()
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in allowed(state, vocab):
            return False
        state.accept_token(token)
    return end in allowed(state, vocab)


def written(
    grammar: CompiledGrammar, tokenizer: Tokenizer, seed: int, most: int = 800, vocab: int = 4096
) -> str:
    """Return a text of random tokens that a grammar allows."""
    rng, state, ids = random.Random(seed), grammar.start(), list[int]()
    for _ in range(most):
        tokens = allowed(state, vocab)
        others = [token for token in tokens if token != 1]
        ends = 1 in tokens and (not others or rng.random() < 0.6)
        token = 1 if ends else rng.choice(others)
        state.accept_token(token)
        if token == 1:
            return tokenizer.decode(ids, skip_special_tokens=False)
        ids.append(token)
    raise AssertionError(f"no end after {most} tokens")
