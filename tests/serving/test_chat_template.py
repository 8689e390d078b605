"""Chat templates: the texts of transformers' apply_chat_template, to the letter."""

import dataclasses
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdecode.serving import ChatTemplate, Tokenizer
from lmdecode.serving.text_model import end_of_turn
from tests.serving.tokenizer_kinds import tokenizer_of
from tests.support.releases import BEFORE_5_23, PLAIN_MESSAGES

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")

FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Wetter \u00fcber <b>'\"",
     "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}},
]  # fmt: skip
USER, ANSWER = {"role": "user", "content": " Hello \n"}, {"role": "assistant", "content": "Hi. "}
TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "three": [USER, ANSWER, USER, {"role": "assistant", "content": "a</think>\nb"}, USER],
    "system": [{"role": "system", "content": "Be brief.\n"}, USER, ANSWER, USER],
    "thoughts": [USER, {**ANSWER, "reasoning": "Hm.\n"}, USER, {**ANSWER, "thinking": "Oh."}],
    "tools": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function",
             "function": {"name": "weather", "arguments": {"place": "\u4e2d"}}}]},
        {"role": "tool", "content": "sun", "tool_call_id": "1"},
    ],
    "other roles": [USER, {"role": "critic", "content": "x"}],
    "no text": [{"role": "user"}],
    "emoji": [{"role": "user", "content": "\U0001f600 {{ bos_token }} {% x %}"}],
}  # fmt: skip


class Noon(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "Noon":
        return cls(2026, 11, 30, 12, tzinfo=tz)


@pytest.fixture(autouse=True, scope="module")
def _one_day() -> Iterator[None]:
    """The same day for both: midnight may come between two texts."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("transformers.utils.chat_template_utils", "lmdecode.serving.chat_template"):
            patch.setattr(f"{module}.datetime", Noon)
        yield


def theirs(template: str | dict[str, str], messages: Any, **options: Any) -> str | None:
    """The text of transformers, None where it raises."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("byte_level"), **SPECIAL
    )
    options = {"add_generation_prompt": True, **options}
    tokenizer.chat_template = template
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text
    except Exception:
        return None


def ours(template: str | dict[str, str], messages: Any, **options: Any) -> str | None:
    try:
        return ChatTemplate(template, special_tokens=SPECIAL).render(messages, **options)
    except ValueError:
        return None


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "options",
    [{}, {"add_generation_prompt": False}, {"tools": TOOLS}, {"enable_thinking": False},
     {"add_generation_prompt": False, "continue_final_message": True},
     {"documents": [{"title": "a", "text": "b"}], "bos_token": "<begin>"}],
    ids=["plain", "whole", "tools", "variable", "continued", "documents"],
)  # fmt: skip
def test_texts_are_those_of_transformers(name: str, talk: str, options: dict[str, Any]) -> None:
    if BEFORE_5_23 and (talk in ("thoughts", "tools") or "continue_final_message" in options):
        pytest.skip(PLAIN_MESSAGES.kwargs["reason"])
    expected = theirs(TEMPLATES[name], TALKS[talk], **options)
    assert ours(TEMPLATES[name], TALKS[talk], **options) == expected


def test_most_talks_are_rendered() -> None:
    """So that the test above compares texts."""
    found = [theirs(text, talk) for text in TEMPLATES.values() for talk in TALKS.values()]
    assert sum(text is not None for text in found) > 0.75 * len(found)


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
        optional={
            "content": st.none() | st.text(max_size=6) | st.just([{"type": "text", "text": "a "}]),
            "reasoning_content": st.text(max_size=3),
        },
    ),
    min_size=1,
    max_size=4,
)


@PLAIN_MESSAGES
@given(MESSAGES, st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", TEMPLATES)
def test_any_talk(name: str, messages: list[Any], asks: bool, goes_on: bool) -> None:
    options = {"add_generation_prompt": asks, "continue_final_message": goes_on}
    expected = theirs(TEMPLATES[name], messages, **options)
    assert ours(TEMPLATES[name], messages, **options) == expected


FUNCTIONS = {
    "tojson": "{{ messages | tojson(indent=1) }}{{ messages | tojson(sort_keys=True) }}",
    "ascii": "{{ messages[0].content | tojson(ensure_ascii=True) }}",
    "blocks": "  {% if true %}\n x\n  {% endif %}\n y",
    "dict": "{{ dict(a=1).a }}{{ dict.fromkeys('ab', 1) | tojson }}{{ dict(c=1) is mapping }}",
    "loop": "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "namespace": "{% set n = namespace(a=1) %}{% set n.b = 2 %}{{ n.a }}{{ n.b }}",
    "no names of Python": "{% set n = namespace() %}{% set n.__class__ = 2 %}",
    "immutable": "{{ messages.append(1) }}", "classes": "{{ messages.__class__.__mro__ }}",
    "missing": "{{ nothing }}{{ messages[0].nothing }}|",
    "missing of missing": "{{ nothing.more }}",
    "tools": "{{ tools is none }}{{ documents is none }}{{ tools is defined }}",
    "endless": "{{ 'a' * 10 ** 30 }}", "range": "{{ range(10 ** 9) | length }}",
    "generation": "{% generation %}a{{ messages[0].content }}{% endgeneration %}",
    "wrong": "{% if %}",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[PLAIN_MESSAGES] if n == "no names of Python" else [])
        for n in FUNCTIONS
    ],
)
def test_functions_and_limits_of_templates(name: str) -> None:
    expected = theirs(FUNCTIONS[name], TALKS["emoji"])
    assert ours(FUNCTIONS[name], TALKS["emoji"]) == expected


def test_several_templates() -> None:
    named = {"default": "{{ 'd' }}", "tool_use": "{{ 't' }}", "rag": "{{ 'r' }}"}
    assert ours(named, [USER]) == theirs(named, [USER]) == "d"
    assert ours(named, [USER], tools=TOOLS) == theirs(named, [USER], tools=TOOLS) == "t"
    template = ChatTemplate(named, special_tokens={})
    assert template.names == ("default", "tool_use", "rag")
    assert template.text(has_tools=True) == "{{ 't' }}" and template.text() == "{{ 'd' }}"
    with pytest.raises(ValueError, match="there are templates rag; expected one named 'default'"):
        ChatTemplate({"rag": "r"}, special_tokens={}).render([USER])


SYSTEMS = [{"role": "system", "content": "Be brief.\n"}, {"role": "system", "content": "Be kind."}]
JOINED = [{"role": "system", "content": "Be brief.\n\n\nBe kind."}]
AT_THE_BEGINNING = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message must be at the beginning') }}{% endif %}"
    "{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}])
def test_systems_are_joined_where_a_template_does_not_write_each(
    name: str, options: dict[str, Any]
) -> None:
    """It may refuse the second one, or write it as what a user says, or leave it out."""
    talk = [*SYSTEMS, USER, ANSWER, USER]
    several = ours(TEMPLATES[name], talk, **options)
    joined = ours(TEMPLATES[name], [*JOINED, USER, ANSWER, USER], **options)
    is_one = name in ("instructions", "turns", "wide_bars")
    assert several != joined or several is None
    got = ours(TEMPLATES[name], talk, joins_systems=True, **options)
    assert got == (joined if is_one else several)
    assert (got is None) == (name == "turns")  # which takes none at all


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        (SYSTEMS, "system: Be brief.\n\n\nBe kind.\n"),
        ([SYSTEMS[0], USER], "system: Be brief.\n\nuser:  Hello \n\n"),
        ([USER, SYSTEMS[0]], "at messages[1] (system): a system message must be at the beginning"),
        ([*SYSTEMS, USER, SYSTEMS[0]], "at messages[3] (system): a system message"),
        ([*SYSTEMS, USER, {"role": "tool"}], "at messages[3] (tool): 'dict object' has no attr"),
        ([{"role": "system"}], "at messages[0] (system): 'dict object' has no attribute"),
    ],
)
def test_a_failure_names_the_message(messages: list[dict[str, Any]], wanted: str) -> None:
    template = ChatTemplate(AT_THE_BEGINNING, special_tokens={})
    try:
        assert template.render(messages, joins_systems=True) == wanted
    except ValueError as error:
        assert f"ChatTemplate.render: the chat template failed {wanted}" in str(error)


def test_a_failure_behind_all_messages_names_none() -> None:
    source = "{% for m in messages %}{{ m.role }}{% endfor %}{{ raise_exception('no question') }}"
    with pytest.raises(ValueError, match="the chat template failed: no question"):
        ChatTemplate(source, special_tokens={}).render([USER, ANSWER])


def test_joined_systems_may_be_continued() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert ours(AT_THE_BEGINNING, SYSTEMS, joins_systems=True, **options) == (
        "system: Be brief.\n\n\nBe kind."
    )


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ M }}|{{ M }}</s>", "Once upon|Once upon"),
        ("{{ M }}|{{ M }} {{ M }}</s>", "Once upon|Once upon Once upon"),
        ("{{ M | trim }}{{ ' or ' + M | trim }}</s>", "Once upon or Once upon"),
        ("{{ M | trim }} | {{ M }}</s>", "Once upon | Once upon"),
        ("{{ M }} | {{ M | trim }}</s>", "Once upon | Once upon"),
        ("{{ M }}: {{ messages | tojson }}", 'Once upon: [{"role": "user", "content": "Once upon'),
    ],
)
def test_a_message_that_is_written_several_times_goes_on_behind_its_last(
    source: str, wanted: str
) -> None:
    """transformers 5.23 leaves its mark behind all the others."""
    source = source.replace("M", "messages[-1].content")
    options = {"add_generation_prompt": False, "continue_final_message": True}
    talk = [{"role": "user", "content": "Once upon"}]
    assert ours(source, talk, **options) == wanted
    assert "CONTINUE_FINAL_MESSAGE_TAG" in theirs(source, talk, **options)


@PLAIN_MESSAGES
def test_objects_are_seen_as_plain_values() -> None:
    @dataclasses.dataclass
    class Message:
        role: str
        content: object

    talk = [{"role": "user", "content": Message("a", [object(), (1, 2.5, True)])}]
    template = "{{ messages[0].content }}"
    assert ours(template, talk) == theirs(template, talk)


@pytest.mark.parametrize(
    ("messages", "options", "error", "message"),
    [
        ([], {}, ValueError, "messages are empty"),
        ("Hello", {}, TypeError, "messages is of type str; expected a sequence of dicts"),
        (["Hello"], {}, TypeError, "a message is of type str; expected a dict"),
        ([USER], {"continue_final_message": True}, ValueError, "are both True"),
        ([{"role": "user", "content": "raise"}], {}, ValueError, "template failed: no raise"),
        ([{"role": "user", "content": 3}], {}, ValueError, "the chat template failed: "),
    ],
)
def test_what_is_refused(messages: Any, options: Any, error: Any, message: str) -> None:
    source = (
        "{% if messages[0].content == 'raise' %}{{ raise_exception('no raise') }}{% endif %}"
        "{{ 'a' + messages[0].content }}"
    )
    with pytest.raises(error, match=message):
        ChatTemplate(source, special_tokens={}).render(messages, **options)


@pytest.mark.parametrize("source", [None, 3, {}, {"default": 3}])
def test_what_is_no_template(source: Any) -> None:
    with pytest.raises(TypeError, match=r"ChatTemplate: (source|default) is of type"):
        ChatTemplate(source, special_tokens={})


@pytest.mark.parametrize(
    ("name", "end"),
    [("chatml_default_system", "<|im_end|>"), ("chatml_tools_think", "<|im_end|>"),
     ("instructions", "</s>"), ("headers", None)],
)  # fmt: skip
def test_the_token_that_ends_a_turn(name: str, end: str | None) -> None:
    """None of Llama's: this tokenizer does not know its tokens."""
    tokenizer = Tokenizer(tokenizer_of("byte_level"))
    template = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL)
    found = end_of_turn(template, tokenizer)
    assert found == (None if end is None else tokenizer.inner.token_to_id(end))


@pytest.mark.parametrize(
    ("loop", "reads_parts"),
    [
        ("for c in message['content']", True), ('for c in message["content"]', True),
        ("for c in message.content", True), ("for c in content", True),
        ("for c in message['content'] | selectattr('type')", True),
        ("for c in message.content if c.type == 'text'", True),
        ("for c in message['content'][1:]", True), ("for c in message.content.split('x')", False),
        ("for c in message['tool_calls']", False), ("for c in message['content'].items()", False),
        ("for c in contents", False), ("for c in message.contents", False),
    ],
)  # fmt: skip
def test_a_loop_over_a_content_reads_its_parts(loop: str, reads_parts: bool) -> None:
    """What vLLM 0.32.0 tells by the tree of the template."""
    for begin, end in (("{% ", " %}"), ("{%- ", " -%}"), ("{%-\n", "\n%}")):
        source = f"{{% for message in messages %}}{begin}{loop}{end}x{{% endfor %}}{{% endfor %}}"
        template = ChatTemplate(source, special_tokens={})
        assert template.reads_parts() == template.reads_parts(has_tools=True) == reads_parts
