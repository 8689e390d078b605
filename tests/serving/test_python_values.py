r"""Arguments of calls as Python writes them: the values of Python's own literals, or no call."""

import ast
import json
import warnings
from typing import Any

import pytest

from lmdecode.serving.tool_calls import FORMATS

# Where each format has calls as Python writes them.
WRITTEN = {
    "pythonic": "[f({})]", "lfm2": "<|tool_call_start|>[f({})]<|tool_call_end|>",
    "olmo3": "<function_calls>\nf({})\n</function_calls>", "llama3_json": "[f({})]",
    "generic": "[f({})]",
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TAKEN = [
    r'"\d+"', r"'\033[0m'", r'"\0"', r'"\q\'"', r'"\x41\u00e9\U0001F600"',
    r'r"\d+\n"', r"R'a\'b'", r'u"x"', '"a" "b"', "'a'\"b\"r'\\c'", '("a"\n "b")', '("a")', "((1))",
    "(1,)", "()", "(1, 2)", "((1, 2), 3)", "0x1F", "0XfF", "0b11", "0o17", "-0x10", "1_000",
    "1_0.5_0", "1e5", "1E+5", "1.", ".5", "-5", "- 5", "+5", "00", "0.50", "True", "False", "None",
    '{"a": "x" "y", "b": r"\\d"}', '[r"\\d", "a" "b", (2)]', "{r'\\k': 1}", '{"a" "b": (1)}', "{}",
    '"""a\nb"""', "'''it's'''", '"" "a"', '[1, [2.5, None], {"k": -1}]', "'a\\\nb'",
]  # fmt: skip
LEFT = [
    'b"x"', 'f"{1}"', 'rb"x"', 'F"x"', 'ur"x"', '"a" b"b"', '"a" f"b"', "007", "0777", "1__0", "1_",
    "0x", "0b2", "0o8", "1j", "\u0663", "--5", "2*3", '"a" + "b"', r'"\x4"', r'"\U00110000"',
    r'"\Uffffffff"',
    r'"\N{BULLET}"', r'"\N"', "{1, 2}", "nan", "inf", "1e400", "...", "x", "not True", "9" * 1001,
    '"a', "[1", "1 2",
]  # fmt: skip


def values_of(name: str, written: str) -> Any:
    """Return the arguments of the call, or the whole text where there is none."""
    text = WRITTEN[name].format(written)
    content, calls = FORMATS[name].parse(text, TOOLS)
    pieces = FORMATS[name].stream(TOOLS)
    deltas = [delta for c in text for delta in pieces.push(c)] + pieces.finish()
    if not calls:
        assert content == text and "".join(delta.text for delta in deltas) == text
        return text
    assert content is None and [delta.arguments for delta in deltas] == [calls[0].arguments]
    return json.loads(calls[0].arguments)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_value_is_that_of_pythons_literal(name: str) -> None:
    for literal in TAKEN:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes that are none
            wanted = json.loads(json.dumps(ast.literal_eval(literal)))
        got = values_of(name, f"a={literal}, b=[{literal}]")
        assert got == {"a": wanted, "b": [wanted]}, literal
        assert type(got["a"]) is type(wanted), literal


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_no_literal_of_python_is_left_whole(name: str) -> None:
    for text in (*(f"a={one}" for one in LEFT), "a=1, a=2", "1", "a=1,, b=2"):
        assert values_of(name, text) == WRITTEN[name].format(text), text


def test_words_and_slashes_of_json_are_taken_too() -> None:
    """A grammar writes the first, and models the second."""
    assert values_of("pythonic", r'a=true, b=null, c="\/"') == {"a": True, "b": None, "c": "/"}
