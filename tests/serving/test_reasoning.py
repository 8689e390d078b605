"""``ReasoningFormat``: thoughts and answers told apart, whole and in pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmdecode.serving.reasoning import ReasoningFormat

THINK = ReasoningFormat.of_template("{{ '<think>' }} {{ '</think>' }}")
MISTRAL = ReasoningFormat.of_template("[THINK] [/THINK]")
HARMONY = ReasoningFormat.of_template(
    "<|start|>system<|message|><|end|><|channel|>analysis<|channel|>final<|return|>"
)
CALL = "<|channel|>commentary to=functions.get"


@pytest.mark.parametrize(
    ("format", "text", "is_inside", "want"),
    [
        (THINK, "<think>\nHm, yes.\n</think>\n\nIt is.", False, ("Hm, yes.", "It is.")),
        (THINK, "Hm, yes.\n</think>\nIt is. ", True, ("Hm, yes.", "It is. ")),
        (THINK, "<think>\nHm</think>A", True, ("Hm", "A")),
        (THINK, "<think>\n\n</think>\n\nIt is.", False, (None, "It is.")),
        (THINK, "It is <think>.", False, (None, "It is <think>.")),
        (THINK, " It is.", False, (None, " It is.")),
        (THINK, "<think>Hm, not yet", False, ("Hm, not yet", "")),
        (THINK, "Hm </think", True, ("Hm </think", "")),
        (THINK, "a</think>b</think><think>c", True, ("a", "b</think><think>c")),
        (THINK, "", True, (None, "")),
        (THINK, "<think><think>", True, ("<think>", "")),
        (THINK, "<think> <think><think>a</think>b", False, ("<think>a", "b")),
        (THINK, "<thi", False, (None, "<thi")),
        (MISTRAL, "[THINK]a[/THINK]b", False, ("a", "b")),
        (HARMONY, "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final"
                  "<|message|>It is.<|return|>", False, ("Hm", "It is.")),
        (HARMONY, "<|channel|>final<|message|>It is.", False, (None, "It is.")),
        (HARMONY, "It is.", False, (None, "It is.")),
        (HARMONY, "<|channel|>analysis<|message|>Hm", False, ("Hm", "")),
        (HARMONY, "<|channel|>anal", False, (None, "")),
        (HARMONY, "<|channel|>analysis<|message|>a<|end|><|start|>assistant" + CALL +
                  " <|constrain|>json<|message|>{}<|call|>", False,
         ("a", CALL + "<|message|>{}")),
        (HARMONY, " to=functions.get<|channel|>commentary json<|message|>{}<|call|>", False,
         (None, CALL + "<|message|>{}")),
        (HARMONY, "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
                  "<|channel|>analysis<|message|>b", False, ("b", "I look.")),
    ],
)  # fmt: skip
def test_parse(
    format: ReasoningFormat, text: str, is_inside: bool, want: tuple[str | None, str]
) -> None:
    assert format.parse(text, is_inside) == want
    parser, got = format.stream(is_inside), {"reasoning": "", "content": ""}
    for delta in [d for c in text for d in parser.push(c)] + parser.finish():
        assert delta.text
        got[delta.kind] += delta.text
    assert (got["reasoning"] or None, got["content"]) == want


def test_formats_of_templates() -> None:
    assert ReasoningFormat.of_template(None) is None
    assert ReasoningFormat.of_template("{{ messages }}") is None
    for source, name in (
        ("</think>", "think"), ("[/THINK]", "think_brackets"), ("</seed:think>", "seed"),
        ("Here is my response:", "granite"), ("<|END_THINKING|>", "start_thinking"),
    ):  # fmt: skip
        found = ReasoningFormat.of_template(f"{{{{ '{source}' }}}}")
        assert found is not None and found.name == name


def test_where_a_prompt_ends() -> None:
    assert THINK.starts_inside("user: hi\nassistant:\n<think>\n")
    assert not THINK.starts_inside("assistant:\n<think>\n\n</think>\n\n")
    assert not THINK.starts_inside("user: what is <think> ?\nassistant:\n")
    assert not HARMONY.starts_inside("<|start|>assistant")


PIECES = ["<think>", "</think>", "<think", "</", ">", "\n", " ", "a", "Hm. ", "<|channel|>",
          "<|message|>", "<|end|>", "<|start|>assistant", "analysis", "final", "commentary",
          " to=functions.f", "<|return|>", "<|call|>", "<|", "{}"]  # fmt: skip


@given(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.lists(st.integers(0, 60), max_size=6),
    st.booleans(),
    st.sampled_from([THINK, HARMONY]),
)
def test_pieces_make_no_difference(
    text: str, cuts: list[int], is_inside: bool, format: ReasoningFormat
) -> None:
    want = format.parse(text, is_inside)
    parser, got = format.stream(is_inside), {"reasoning": "", "content": ""}
    ends = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    deltas = [d for a, b in pairwise(ends) for d in parser.push(text[a:b])]
    for delta in [*deltas, *parser.finish()]:
        got[delta.kind] += delta.text
    assert (got["reasoning"] or None, got["content"]) == want


@pytest.mark.parametrize("length", [380, 389, 390, 399, 400, 450])
@pytest.mark.parametrize("begin", ["<|start|>", "<|channel|>analysis", "to="])
def test_pieces_of_a_long_header_make_no_difference(begin: str, length: int) -> None:
    text = f"{begin.ljust(length, 'x')}<|message|>hi"
    parser = HARMONY.stream()
    deltas = [delta for c in text for delta in parser.push(c)] + parser.finish()
    said = {kind: "".join(d.text for d in deltas if d.kind == kind) or default
            for kind, default in (("reasoning", None), ("content", ""))}  # fmt: skip
    assert HARMONY.parse(text) == (said["reasoning"], said["content"])
