"""Options of CTranslate2's calls (LMDECODE_DRAWN_FOLDERS: how many random folders are tried)."""

import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import lmdecode
from lmdecode.readers.ctranslate2.folder import open_folder
from tests.readers.ctranslate2.converted_models import converted, original, rewritten, words_of

ctranslate2 = pytest.importorskip("ctranslate2")

COUNT = int(os.environ.get("LMDECODE_DRAWN_FOLDERS", "6"))
KINDS = ("marian", "bart", "m2m_100", "t5", "gpt2", "llama")
CAUSAL_KINDS = ("gpt2", "llama")
PAGE = Path(__file__).resolve().parents[3] / "docs/reference/ctranslate2.md"
ROWS, MOST, PREFIX = 4, 20, [7, 9, 11]
# By a name: what CTranslate2 is given, and generate().
BOTH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "greedy": ({"beam_size": 1}, {"num_beams": 1}),
    "beams": ({"beam_size": 4}, {"num_beams": 4}),
    "all results": (
        {"beam_size": 4, "num_hypotheses": 4}, {"num_beams": 4, "num_return_sequences": 4},
    ),
    "a long text preferred": (
        {"beam_size": 3, "length_penalty": 2.0}, {"num_beams": 3, "length_penalty": 2.0},
    ),
    "no length penalty": (
        {"beam_size": 3, "length_penalty": 0.0}, {"num_beams": 3, "length_penalty": 0.0},
    ),
    "repetition, greedy": (
        {"beam_size": 1, "repetition_penalty": 1.6}, {"num_beams": 1, "repetition_penalty": 1.6},
    ),
    "repetition": (
        {"beam_size": 3, "repetition_penalty": 1.6}, {"num_beams": 3, "repetition_penalty": 1.6},
    ),
    "less than 1": (
        {"beam_size": 2, "repetition_penalty": 0.7}, {"num_beams": 2, "repetition_penalty": 0.7},
    ),
    "n-grams": (
        {"beam_size": 3, "no_repeat_ngram_size": 2}, {"num_beams": 3, "no_repeat_ngram_size": 2},
    ),
    "words, greedy": (
        {"beam_size": 1, "no_repeat_ngram_size": 1}, {"num_beams": 1, "no_repeat_ngram_size": 1},
    ),
    "no unknown token": (
        {"beam_size": 2, "disable_unk": True}, {"num_beams": 2, "suppress_tokens": [3]},
    ),
    "suppressed": (
        {"beam_size": 2, "suppress_sequences": [["w20"], ["w21", "w22"]]},
        {"num_beams": 2, "bad_words_ids": [[20], [21, 22]]},
    ),
    "another end": ({"beam_size": 2, "end_token": ["w30"]}, {"num_beams": 2, "eos_token_id": 30}),
    "two ends": (
        {"beam_size": 3, "end_token": ["w30", "w31"]}, {"num_beams": 3, "eos_token_id": [30, 31]},
    ),
    "batches": ({"beam_size": 2, "max_batch_size": 3}, {"num_beams": 2}),
}  # fmt: skip


def drawn_folder(number: int, root: Path) -> tuple[str, Path]:
    """Return the kind and the folder of a converted model with other weights, and other ends."""
    kind, draw = KINDS[number % len(KINDS)], torch.Generator().manual_seed(number)
    folder = converted(kind, root)
    if number < len(KINDS) and kind in CAUSAL_KINDS:
        return kind, folder
    new = root / f"drawn {number}"
    if new.exists():
        return kind, new

    def change(variables: dict[str, torch.Tensor], aliases: dict[str, str]) -> None:
        for name, value in variables.items():
            if name.endswith("weight") and value.dim() == 2 and number >= len(KINDS):
                noise = torch.randn(value.shape, generator=draw) * value.std() * 0.7
                is_row = value.abs().sum(dim=1, keepdim=True) > 0  # Marian's last one is none
                variables[name] = value + noise * is_row

    rewritten(folder, new, change)
    if kind not in CAUSAL_KINDS:
        path, flags = new / "config.json", divmod(number % 4 if number >= len(KINDS) else 3, 2)
        settings = json.loads(path.read_text())
        settings |= {"add_source_bos": bool(flags[0]), "add_source_eos": bool(flags[1])}
        path.write_text(json.dumps(settings))
    return kind, new


class Both:
    """A folder as CTranslate2 and as Decoding run it; each returns [rows][results] of tokens."""

    def __init__(self, number: int, root: Path) -> None:
        self.kind, folder = drawn_folder(number, root)
        self.is_causal = self.kind in CAUSAL_KINDS
        runner = ctranslate2.Generator if self.is_causal else ctranslate2.Translator
        self.runner = runner(str(folder), compute_type="float32", intra_threads=1)
        self.decoding = lmdecode.Decoding.from_pretrained(folder)
        self.words = words_of(original(self.kind))
        self.ids = {word: i for i, word in enumerate(self.words)}
        draw = torch.Generator().manual_seed(number)
        lengths = torch.randint(2, 9, (ROWS,), generator=draw).tolist()
        self.rows = [torch.randint(4, 60, (n,), generator=draw).tolist() for n in lengths]
        settings = json.loads((folder / "config.json").read_text())
        self.starts = self.words.index(settings["bos_token"]) if self.is_causal else None

    def theirs(self, prefix: list[int] | None = None, **options: Any) -> list[list[list[int]]]:
        texts = [[self.words[token] for token in row] for row in self.rows]
        if self.is_causal:
            found = self.runner.generate_batch(texts, **options)
            self.found_scores = torch.tensor([result.scores for result in found])
            return [result.sequences_ids for result in found]
        if prefix:
            options["target_prefix"] = [[self.words[token] for token in prefix]] * len(texts)
        found = self.runner.translate_batch(texts, **options)
        self.found_scores = torch.tensor([result.scores for result in found])
        return [[[self.ids[word] for word in h] for h in result.hypotheses] for result in found]

    def ours(self, prefix: list[int] | None = None, **options: Any) -> list[list[list[int]]]:
        """Return them without what they begin with, and without their ends, as CTranslate2."""
        ends = options.get("eos_token_id", self.decoding.model.generation_config.eos_token_id)
        ends = [ends] if isinstance(ends, int) else ends
        most, found = max(map(len, self.rows)), []
        ids, mask = torch.zeros(ROWS, most).long(), torch.zeros(ROWS, most).long()
        for i, row in enumerate(self.rows):
            where = slice(most - len(row), None) if self.is_causal else slice(len(row))
            ids[i, where], mask[i, where] = torch.tensor(row), 1
        if prefix:
            start = self.decoding.model.generation_config.decoder_start_token_id
            options["decoder_input_ids"] = torch.tensor([[start, *prefix]] * ROWS)
        out = self.decoding.generate(input_ids=ids, attention_mask=mask, **options)
        if options.get("return_dict_in_generate"):
            self.found_scores, out = out["sequences_scores"], out["sequences"]
        count = options.get("num_return_sequences", 1)
        for i, row in enumerate(out.view(ROWS, count, -1).tolist()):
            begun = most if self.is_causal else 1 + len(prefix or [])
            before = self.rows[i] if self.is_causal else [0, *(prefix or [])]
            before = before[1:] if not self.is_causal or before[0] == self.starts else before
            texts = []
            for text in row:
                behind = text[begun:]
                end = next((k for k, token in enumerate(behind) if token in ends), len(behind))
                texts.append([*before, *behind[:end]])
            found.append(texts)
        return found

    def parts_at_a_tie(
        self, prefix: list[int] | None, theirs: dict[str, Any], mine: dict[str, Any], most: str
    ) -> bool:
        """Whether beams first differ where results have the same scores, but for rounding."""
        beams = theirs.get("beam_size", 1 if self.is_causal else 2)
        keep = {"return_dict_in_generate": True, "output_scores": True}
        least, apart = max(mine.get("min_length", 2), 2 + len(prefix or [])) - 1, set()
        for length in range(least, theirs[most] + 1):
            lengths = ({most: length}, {"max_length": length + 1})
            want = self.theirs(
                prefix, **theirs | lengths[0] | {"num_hypotheses": beams, "return_scores": True}
            )
            their_scores = self.found_scores
            got = self.ours(prefix, **mine | lengths[1] | {"num_return_sequences": beams}, **keep)
            is_like = torch.isclose(their_scores, self.found_scores.view(ROWS, -1), rtol=1e-4)
            is_like |= their_scores < -1e6  # beams that nothing was left for
            for row in range(ROWS):
                if want[row] != got[row] and row not in apart:
                    apart.add(row)
                    if not bool(is_like[row].all()):
                        return False
        return bool(apart)


@pytest.fixture(params=range(COUNT), scope="module")
def both(request: pytest.FixtureRequest, root: Path) -> Both:
    return Both(request.param, root)


def test_tokens_with_every_option_are_those_of_ctranslate2(both: Both) -> None:
    least, most = ("min_length", "max_length") if both.is_causal else (
        "min_decoding_length", "max_decoding_length",
    )  # fmt: skip
    if both.is_causal:  # whose length has the padding here, of which CTranslate2 has none
        both.rows = [row[: min(map(len, both.rows))] for row in both.rows]
    cases: dict[str, tuple[dict[str, Any], dict[str, Any], list[int] | None]] = {
        name: ({most: MOST, **theirs}, {"max_length": MOST + 1, **mine}, None)
        for name, (theirs, mine) in BOTH.items()
    }
    cases["at least"] = (
        {most: MOST, least: 12, "beam_size": 3},
        {"max_length": MOST + 1, "min_length": 13, "num_beams": 3}, None,
    )  # fmt: skip
    if not both.is_causal:
        for name in ("greedy", "beams", "all results", "repetition", "n-grams", "suppressed"):
            theirs, mine, _ = cases[name]
            cases[f"{name}, behind a prefix"] = theirs, mine, PREFIX
    ties = 0
    for name, (theirs, mine, prefix) in cases.items():
        want, got = both.theirs(prefix, **theirs), both.ours(prefix, **mine)
        if want != got:
            assert both.parts_at_a_tie(prefix, theirs, mine, most), (both.kind, name, want, got)
            ties += 1
    assert ties <= 5


@pytest.mark.parametrize("option", [{"repetition_penalty": 1.6}, {"no_repeat_ngram_size": 2}, {}])
@pytest.mark.parametrize("number", [4, 5])
def test_padding_of_prompts_is_not_penalised(
    number: int, option: dict[str, Any], root: Path
) -> None:
    both = Both(number, root)
    assert len(set(map(len, both.rows))) > 2
    want, got = (
        both.theirs(max_length=MOST + 12, **option),
        both.ours(max_new_tokens=MOST, **option),
    )
    assert [row[0] for row in got] == [a[: len(b)] for (a,), (b,) in zip(want, got, strict=True)]


def test_a_generation_config_has_the_defaults_too(root: Path) -> None:
    both = Both(1, root)
    config = GenerationConfig(num_beams=3, length_penalty=2.0)
    got = both.ours(generation_config=config)
    assert got == both.ours(num_beams=3, length_penalty=2.0)
    assert got == both.theirs(beam_size=3, length_penalty=2.0, max_decoding_length=96)
    assert config.max_length is None and config.renormalize_logits is None


@pytest.mark.parametrize("number", [3, 5])
def test_tokens_without_options_are_those_of_ctranslate2(number: int, root: Path) -> None:
    """The lengths are the defaults, too: these models have as many positions as they like."""
    both = Both(number, root)
    both.rows = [row[:2] for row in both.rows]
    want, got = both.theirs(), both.ours()
    assert got == want
    longest = max(len(text) for (text,) in want)
    assert longest in ((513, 512) if both.is_causal else (256,))


def signature(function: Any) -> dict[str, str]:
    """Return the arguments of a function of pybind11, and their defaults, as its docstring has."""
    arguments = re.search(r"\((.*)\) -> ", function.__doc__.partition("\n")[0])
    parts, depth = [""], 0
    for letter in arguments[1]:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    named = [re.match(r"(\w+): .*?(?: = (.*))?$", part.strip()) for part in parts]
    return {match[1]: match[2] or "" for match in named if match and match[1] != "self"}


def test_the_page_has_a_row_for_every_option_of_ctranslate2() -> None:
    section = PAGE.read_text().partition("## Options")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines[2:]]
    assert len(rows) > 30 and all(row[2] for row in rows)
    for column, function in enumerate(
        (ctranslate2.Translator.translate_batch, ctranslate2.Generator.generate_batch)
    ):
        named = itertools.chain.from_iterable(re.findall("`(.*?)`", row[column]) for row in rows)
        told = dict([*each.partition("=")[::2]] for each in named)
        assert told == {k: v.replace("'", "") for k, v in signature(function).items()}


def test_the_settings_that_converters_write_are_known() -> None:
    from ctranslate2.converters import transformers as converters
    from ctranslate2.specs import model_spec, whisper_spec

    from lmdecode.readers.ctranslate2.generation_config import SETTINGS

    written: set[str] = set()
    for config in (
        model_spec.SequenceToSequenceModelConfig(), model_spec.LanguageModelConfig(),
        whisper_spec.WhisperConfig(),
    ):  # fmt: skip
        written |= config.to_dict().keys()
    folder = Path(converters.__file__).parent
    for path in [*folder.glob("*.py"), *(folder.parent / "specs").glob("*.py")]:
        text = path.read_text()
        written |= set(re.findall(r"(?<!\.)(?:spec\.|self\.)?_?\bconfig\.(\w+) = ", text))
        written |= set(re.findall(r'_config\.add_attribute\(\s*"(\w+)"', text))
        written |= set(re.findall(r'self\._config\["(\w+)"\] = ', text))
    written = {name for name in written if not name.startswith("quantization_")}
    assert written - {"model"} == SETTINGS  # that one is of a checkpoint of Eole


def test_a_config_of_transformers_in_the_same_file_changes_nothing(
    root: Path, tmp_path: Path
) -> None:
    """hf-hub-ctranslate2 puts both together; CTranslate2 reads its own entries alone."""
    folder = converted("marian", root)
    plain, new = open_folder(folder), tmp_path / "new"
    shutil.copytree(folder, new)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "marian", "architectures": ["MarianMTModel"], "eos_token_id": 3}
    (new / "config.json").write_text(json.dumps(settings))
    both = open_folder(new)
    assert (plain.config, plain.generation) == (both.config, both.generation)
    (new / "config.json").write_text(json.dumps({**settings, "quantization_type": 1}))
    with pytest.raises(ValueError, match="has weights of AWQ"):
        open_folder(new)
