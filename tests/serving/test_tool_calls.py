"""``ToolFormat``: calls in the texts of each family, whole, in pieces, and damaged."""

import json
import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdecode.serving import tool_readers
from lmdecode.serving.tool_calls import FORMATS, CallDelta, ContentDelta, ToolFormat

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
PARIS, ROME = {"city": "Paris", "days": 2}, {"city": 'R}"o\nme'}
BAR, GAP = "\uff5c", "\u2581"


def deepseek(text: str) -> str:
    """Return a text with DeepSeek's bars and spaces."""
    return text.replace("<|", f"<{BAR}").replace("|>", f"{BAR}>").replace("~", GAP)


# The calls of each family as its models write them: the text, and what is beside them.
CASES: list[tuple[str, str, str | None, list[tuple[str, Any]]]] = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n'
     "</tool_call>", None, [("get_weather", PARIS)]),
    ("hermes", 'I look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n'
     '{"name": "get_weather", "arguments": {"city": "R}\\"o\\nme"}}\n</tool_call>', "I look.",
     [("now", {}), ("get_weather", ROME)]),
    ("hermes", '<tool_call>{"name": "now"}', None, [("now", {})]),
    ("qwen3_coder", "Well.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
     "</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>", "Well.",
     [("get_weather", PARIS)]),
    ("qwen3_coder", '<function=get_weather><parameter=city>R}"o\nme</parameter></function>', None,
     [("get_weather", ROME)]),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n"
     "<parameter=days>\nsoon\n</parameter>\n</function>\n</tool_call>", None,
     [("get_weather", {"city": "12", "days": "soon"})]),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}', None,
     [("get_weather", PARIS)]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', None,
     [("now", {})]),
    ("llama3_json", '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', None,
     [("now", {}), ("now", {})]),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("pythonic", "[get_weather(city='Paris', days=2), now()]", None,
     [("get_weather", PARIS), ("now", {})]),
    ("pythonic", "[1, 2] are numbers", "[1, 2] are numbers", []),
    ("mistral_list", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days":'
     ' 2}}, {"name": "now", "arguments": {}}]', None, [("get_weather", PARIS), ("now", {})]),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now[ARGS]{}',
     None, [("get_weather", PARIS), ("now", {})]),
    ("mistral", 'Yes.[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}', "Yes.", [("now", {})]),
    ("phi4", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', None, [("now", {})]),
    ("functools", 'functools[{"name": "now", "arguments": {}}]', None, [("now", {})]),
    ("functools", "Python has functools[1].", "Python has functools[1].", []),
    ("nemotron", '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>', None, [("now", {})]),
    ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
     None, [("get_weather", PARIS)]),
    ("deepseek", deepseek('<|tool~calls~begin|><|tool~call~begin|>function<|tool~sep|>get_weather\n'
     '```json\n{"city": "Paris", "days": 2}\n```<|tool~call~end|><|tool~calls~end|>'), None,
     [("get_weather", PARIS)]),
    ("deepseek_v31", deepseek('Hm.<|tool~calls~begin|><|tool~call~begin|>now<|tool~sep|>{}'
     '<|tool~call~end|><|tool~call~begin|>now<|tool~sep|>{}<|tool~call~end|><|tool~calls~end|>'),
     "Hm.", [("now", {}), ("now", {})]),
    ("lfm2", '<|tool_call_start|>[get_weather(city="Paris", days=2)]<|tool_call_end|>I look.',
     "I look.", [("get_weather", PARIS)]),
    ("olmo3", '<function_calls>\nget_weather(city="Paris", days=2)\nnow()\n</function_calls>', None,
     [("get_weather", PARIS), ("now", {})]),
    ("functiongemma", "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}"
     "<end_function_call>", None, [("get_weather", PARIS)]),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>R}"o\nme<|"|>}<tool_call|>', None,
     [("get_weather", ROME)]),
    ("harmony", '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>'
     '{"city": "Paris", "days": 2}<|call|>', None, [("get_weather", PARIS)]),
    ("generic", '```json\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n```',
     None, [("get_weather", PARIS)]),
    ("generic", "First:\n```tool_code\nget_weather(city='Paris', days=2)\n```\nThen.",
     "First:\n\nThen.", [("get_weather", PARIS)]),
    ("generic", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
    ("generic", '{"function": {"name": "now", "arguments": "{}"}}', None, [("now", {})]),
]  # fmt: skip


def streamed(
    format: ToolFormat, text: str, cuts: list[int], tools: Any, is_cut: bool = False
) -> tuple[str | None, list[tuple[str, Any]]]:
    """Return what all pieces are together; check how they come."""
    parser = format.stream(tools)
    ends = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    deltas = [d for a, b in pairwise(ends) for d in parser.push(text[a:b])]
    deltas += parser.finish(is_cut)
    content, calls = "", list[list[str]]()
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            assert delta.text
            content += delta.text
        else:
            assert isinstance(delta, CallDelta)
            if delta.index == len(calls):
                assert delta.id and delta.name
                calls.append([delta.name, ""])
            else:
                assert delta.index == len(calls) - 1 and delta.id is None and delta.name is None
            calls[-1][1] += delta.arguments
    found = [(name, json.loads(arguments)) for name, arguments in calls]
    return (content if content or not found else None), found


def parsed(format: ToolFormat, text: str, tools: Any) -> tuple[str | None, list[tuple[str, Any]]]:
    content, calls = format.parse(text, tools)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_parse(name: str, text: str, content: str | None, calls: list[tuple[str, Any]]) -> None:
    format = FORMATS[name]
    assert parsed(format, text, TOOLS) == (content, calls)
    assert streamed(format, text, list(range(len(text))), TOOLS) == (content, calls)


def test_every_format_has_a_case() -> None:
    assert {name for name, *_ in CASES} == set(FORMATS)


FILE = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"},
                   "lines": {"type": "array"}, "mark": {"enum": ["end", "</function>\n</tool_call>",
                   "a\n</parameter>\n</function>"]}},
}  # fmt: skip
FILES = [{"type": "function", "function": {"name": "write", "parameters": FILE}}]
OPEN, CLOSE = "<tool_call>\n<function=write>\n", "</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        # Words of the format in values.
        ("<parameter=text>\na</function> b\n</parameter>\n</function>", {"text": "a</function> b"}),
        ("<parameter=text>\n</function>\n</parameter>\n</function>", {"text": "</function>"}),
        ("<parameter=text>\n</parameter>\n\n</parameter>\n</function>", {"text": "</parameter>\n"}),
        ("<parameter=text>\n\n</tool_call>\n</parameter>\n</function>", {"text": "\n</tool_call>"}),
        ("<parameter=text>\n<parameter=odd>\n\n</parameter>\n</function>",
         {"text": "<parameter=odd>\n"}),
        ('<parameter=lines>\n["</function>", "</parameter></function></tool_call>"]\n</parameter>\n'
         "</function>", {"lines": ["</function>", "</parameter></function></tool_call>"]}),
        ("<parameter=mark>\n</function>\n</tool_call>\n</parameter>\n</function>",
         {"mark": "</function>\n</tool_call>"}),
        ("<parameter=mark>\na\n</parameter>\n</function>\n</parameter>\n</function>",
         {"mark": "a\n</parameter>\n</function>"}),
        ("<parameter=path>\na\n</parameter>\n<parameter=text>\nx\n<parameter=path>\nb\n</parameter>"
         "\n</function>", {"path": "a", "text": "x\n<parameter=path>\nb"}),
        # End tags that are left out.
        ("<parameter=path>\na\n<parameter=text>\nb\n</parameter>\n</function>",
         {"path": "a", "text": "b"}),
        ("<parameter=path>\na\n</parameter>\n<parameter=text>\nb\n</function>",
         {"path": "a", "text": "b"}),
        ("<parameter=path>\na\n</parameter>\n<parameter=text>\nb\n</parameter>",
         {"path": "a", "text": "b"}),
        ("<parameter=path>a</parameter><parameter=text>b</parameter>", {"path": "a", "text": "b"}),
        ("<parameter=path>\na\n</parameter>\n\n   <parameter=odd>\nb\n</parameter>\n" + " " * 150
         + "</function>", {"path": "a", "odd": "b"}),
    ],
)  # fmt: skip
def test_tags_in_values_and_tags_left_out(inner: str, arguments: Any) -> None:
    format, want = FORMATS["qwen3_coder"], [("write", arguments)]
    for end in ("\n</tool_call>", ""):
        text = f"{OPEN}{inner}{end}"
        assert parsed(format, text, FILES) == (None, want)
        assert streamed(format, text, list(range(len(text))), FILES) == (None, want)
        first = f"{OPEN}{CLOSE}\n"
        assert parsed(format, first + text, FILES) == (None, [("write", {}), *want])


@pytest.mark.parametrize("quote", ['"', "'", '"""', "'''"])
@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("olmo3", "<function_calls>\n", "\n</function_calls>"),
        ("lfm2", "<|tool_call_start|>[", "]<|tool_call_end|>"),
        ("pythonic", "[", "]"),
        ("generic", "```tool_code\n", "\n```"),
        ("generic", "```python\n", "\n```"),
    ],
)
def test_ends_of_calls_within_strings_of_python(
    name: str, begin: str, end: str, quote: str
) -> None:
    value = f"# README\n```sh\n{end}`) ]\n```\n{end}"
    text = f"{begin}write(path={quote}a{quote}, text={quote}{value}{quote}){end}"
    want = (None, [("write", {"path": "a", "text": value})])
    assert parsed(FORMATS[name], text, FILES) == want
    assert streamed(FORMATS[name], text, list(range(len(text))), FILES) == want


@pytest.mark.parametrize("begin", ["```json\n", "```tool_call\n", "```python\n"])
def test_ends_of_blocks_within_strings_of_json(begin: str) -> None:
    arguments = {"text": "# README\n```sh\nmake\n```\n", "lines": ["```"]}
    for call in ({"name": "write", "arguments": arguments}, [{"name": "write", "args": arguments}]):
        text = f"Here:\n{begin}{json.dumps(call, indent=1)}\n```"
        want = ("Here:", [("write", arguments)])
        assert parsed(FORMATS["generic"], text, FILES) == want
        assert streamed(FORMATS["generic"], text, list(range(len(text))), FILES) == want


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_cut_call_is_no_text(
    name: str, text: str, content: str | None, calls: list[tuple[str, Any]]
) -> None:
    """Whatever is cut off: what was text before is text, and calls are those that are complete."""
    format = FORMATS[name]
    begins = [at for word in format.markers if (at := text.find(word)) >= 0]
    before = text[: min(begins, default=0)].rstrip()
    for end in range(len(text) if calls else 0):
        parser = format.stream(TOOLS)
        deltas = [*parser.push(text[:end]), *parser.finish(is_cut=True)]
        said = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        found = [delta.name for delta in deltas if isinstance(delta, CallDelta)]
        assert found == [call for call, _ in calls][: len(found)]
        if len(found) < len(calls):
            assert before.startswith(said.rstrip()), text[:end]
        for cuts in ([], list(range(end))):
            assert streamed(format, text[:end], cuts, TOOLS, is_cut=True)[0] in (said, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"a": 1, "b": ['),
        ("generic", '{"people": [{"name": "get_weather"'),
        ("generic", '```json\n{"a": 1, "b'),
        ("generic", "```python\ndef f(a):\n    return [1"),
        ("pythonic", "[1, 2, 3"),
        ("hermes", "1 is > 0 and"),
        ("functools", "half of"),
    ],
)
def test_what_is_no_cut_call_is_text(name: str, text: str) -> None:
    assert streamed(FORMATS[name], text, [], TOOLS, is_cut=True) == (text, [])


ALL = sorted({text for _, text, *_ in CASES})
BITS = sorted({word for format in FORMATS.values() for word in (*format.words, *format.markers)})
BITS += ["{", "}", "[", "]", '"', "\\", "'", "(", ")", ",", "\n", " ", "now", "a", "name", ":", "1",
         '{"name": "now", "arguments": {}}', "now()", "</function>", "<parameter=a>", "call:now{",
         "</parameter>", "```", "\ud800", "\\ud800", "NaN", "1e999", "\x00"]  # fmt: skip


@settings(max_examples=300)
@given(st.data())
def test_pieces_make_no_difference(data: st.DataObject) -> None:
    """Of whole calls, parts of them, and words in any order; and nothing is an error."""
    format = FORMATS[data.draw(st.sampled_from(sorted(FORMATS)))]
    own = [text for name, text, *_ in CASES if name == format.name]
    piece = st.one_of(
        st.sampled_from(own),
        st.sampled_from(BITS),
        st.sampled_from(ALL).flatmap(lambda text: st.integers(0, len(text)).map(
            lambda end: text[:end])),
        st.text(max_size=5),
    )  # fmt: skip
    text = "".join(data.draw(st.lists(piece, max_size=6)))
    tools = data.draw(st.sampled_from([TOOLS, None]))
    cuts = data.draw(st.lists(st.integers(0, max(len(text), 1)), max_size=8))
    want = parsed(format, text, tools)
    assert streamed(format, text, cuts, tools) == want
    if not want[1]:
        assert want[0] == text


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    "body",
    ["", "{", '{"name": 3}', "[]", "[[[[" * 9000, "{" * 90_000, '{"name": "now", "arguments": 3}',
     '{"name": "now", "arguments": NaN}', "now(" * 9000, "now[ARGS]{", "<function=now>" * 99,
     "call:now{" * 999, '"' * 999, '{"name": "now", "arguments": {"a": 1e999}}', "now(a=\\u12)",
     "x" * 5000],
)  # fmt: skip
def test_what_is_no_call_is_text(format: ToolFormat, body: str) -> None:
    for marker in [*format.markers, ""]:
        text = f"{marker}{body}"
        content, calls = format.parse(text, TOOLS)
        assert not calls and content == text


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_no_piece_of_a_marker_is_text(format: ToolFormat) -> None:
    own = next(text for name, text, _, calls in CASES if name == format.name and calls)
    parser = format.stream(TOOLS)
    deltas = [d for c in own for d in parser.push(c)] + parser.finish()
    before = own[: min(own.find(m) for m in [*format.markers, *format.bare] if m in own)]
    said = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    assert said == before.strip() or said == "I look."


def test_ids() -> None:
    text = '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'
    _, calls = FORMATS["mistral_list"].parse(text)
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)
    assert calls[0].id != calls[1].id
    _, calls = FORMATS["hermes"].parse('<tool_call>{"name": "now"}</tool_call>')
    assert calls[0].id.startswith("call_")


def test_arguments_are_json_of_utf_8() -> None:
    _, calls = FORMATS["hermes"].parse(
        '<tool_call>{"name": "now", "arguments": {"a": "\\ud800", "b": "\u00e9"}}</tool_call>'
    )
    calls[0].arguments.encode()
    _, calls = FORMATS["lfm2"].parse('<|tool_call_start|>[now(a="\\ud83d\\ude00\\x41")]')
    assert calls[0].arguments == '{"a": "\U0001f600A"}'
    _, calls = FORMATS["lfm2"].parse(r"""<|tool_call_start|>[now(a="\d+\033[0m\0\/\'\\d")]""")
    assert json.loads(calls[0].arguments) == {"a": "\\d+\x1b[0m\0/'\\d"}


class _Counted:
    """Counts the characters that searches look at, as ``re.compile`` makes the patterns."""

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)

    def compile(self, pattern: str) -> Any:
        made = re.compile(pattern)

        def search(text: str, at: int) -> Any:
            found = made.search(text, at)
            self.count += (len(text) if found is None else found.end()) - at
            return found

        return SimpleNamespace(search=search, match=made.match)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("inside", ["f{", '{"a":', '{"a', '{\\"', "[f(", "f(", "call:f{", "[{(]}"])
@pytest.mark.parametrize("close", ["", '"' + "}" * 150])
def test_no_bracket_is_looked_for_again(
    format: ToolFormat, inside: str, close: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = _Counted()
    monkeypatch.setattr(tool_readers, "re", counted)
    for marker in format.markers:
        counted.count = 0
        text = (marker + inside) * 150 + close
        format.parse(text, TOOLS)
        assert counted.count <= 20 * len(text)


def test_a_string_that_does_not_end_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = _Counted()
    monkeypatch.setattr(tool_readers, "_IN_STRING", counted.compile(r'["\\\n]'))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"b": {"type": "integer"}}}}}]  # fmt: skip
    parser = FORMATS["hermes"].stream(tools)
    parser.push('<tool_call><function=f>\n<parameter=b>\n"</parameter><parameter=c>')
    for _ in range(1000):
        parser.push("y\\n\\")
    assert 0 < counted.count <= 8000


def test_long_arguments_take_linear_time() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": "' + "x\\n" * 50_000 + '"}}</tool_call>'
    parser = FORMATS["hermes"].stream(TOOLS)
    deltas = [d for at in range(0, len(text), 7) for d in parser.push(text[at : at + 7])]
    assert len(deltas) == 1


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (None, "generic"),
        ("{{ messages }}", "generic"),
        ("For each function call return <tool_call>\n{...}\n</tool_call>", "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=a>", "qwen3_coder"),
        ("Environment: ipython <|python_tag|>", "llama3_json"),
        ('{"name": function name, "parameters": dictionary of argument name', "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral_list"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral"),
        ("<|tool|>{{ tools }}<|/tool|>", "phi4"),
        ("a single JSON list formatted as functools[{...}]", "functools"),
        ("<TOOLCALL>[{...}]</TOOLCALL>", "nemotron"),
        ("{{ '<|tool_call|>' }} available_tools", "granite"),
        ("List of tools: <|tool_list_start|>", "lfm2"),
        ("<start_function_call>", "functiongemma"),
        ("<|tool_call>call:", "gemma4"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        (deepseek("<|tool~call~begin|>function<|tool~sep|>\n```json"), "deepseek"),
        (deepseek("<|tool~call~begin|>name<|tool~sep|>"), "deepseek_v31"),
        ("<function_calls>", "olmo3"),
    ],
)
def test_formats_of_templates(source: str | None, name: str) -> None:
    assert ToolFormat.of_template(source).name == name
