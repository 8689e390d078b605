"""``lmdecode chat``: prompts are those of the whole talk, which goes on in another process."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lmdecode
from lmdecode.__main__ import main
from lmdecode.cli.chat import Talk, TalkFile
from lmdecode.serving import TextModel
from tests.cli.talking import KJV, TEMPLATES, chat, model_with_states, saved_model, talk_of
from tests.support.processes import run_python

transformers = pytest.importorskip("transformers")
pytest.importorskip("lmdecode.store")
LINES = ["In the beginning", "And God said,", "Who was it?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("chatml"), "chatml_default_system")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows no token which ends an answer."""
    folder = saved_model(tmp_path_factory.mktemp("endless"), "chatml_default_system")
    for name, entry in (("tokenizer_config", "eos_token"), ("generation_config", "eos_token_id")):
        path = folder / f"{name}.json"
        settings = json.loads(path.read_text())
        del settings[entry]
        path.write_text(json.dumps(settings))
    return folder


def rendered(template: Path, messages: list[Any]) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(KJV)
    tokenizer.chat_template = template.read_text()
    ids: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    return ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_are_those_of_the_template_for_the_whole_talk(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer is cut by --max-tokens: the template ends it."""
    options = [model, "--chat-template", TEMPLATES[name], "--store", tmp_path, "--seed", 3]
    prompts = chat(monkeypatch, LINES, *options, "--max-tokens", 9)
    messages = talk_of(tmp_path)
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3
    said = [m.get("reasoning_content", "") + m["content"] for m in messages[1::2]]
    assert sum(bool(text.strip()) for text in said) >= 2
    expected = [rendered(TEMPLATES[name], messages[: 2 * turn + 1]) for turn in range(3)]
    assert prompts == expected
    # Another process, and the same talk.
    again = chat(monkeypatch, ["And then?"], *options, "--max-tokens", 1)
    assert again == [
        rendered(TEMPLATES[name], [*messages, {"role": "user", "content": "And then?"}])
    ]


def test_a_talk_without_a_template(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = chat(monkeypatch, LINES[:2], model, "--store", tmp_path, "--max-tokens", 5)
    first, said, second, _ = (message["content"] for message in talk_of(tmp_path))
    tokenizer = transformers.AutoTokenizer.from_pretrained(KJV)
    assert prompts == [
        tokenizer(first).input_ids, tokenizer(f"{first}{said}\n{second}").input_ids
    ]  # fmt: skip


def test_a_model_whose_layers_keep_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process finds the talk in the store, and answers as one that read it anew."""
    model = model_with_states(tmp_path / "model")
    requests = list[lmdecode.Request]()
    submit = lmdecode.Engine.submit

    def noted(self: Any, *arguments: Any, **options: Any) -> lmdecode.Request:
        requests.append(submit(self, *arguments, **options))
        return requests[-1]

    monkeypatch.setattr(lmdecode.Engine, "submit", noted)
    options = [model, "--max-tokens", 5, "--temperature", 0]
    lines, stored = [" ".join(LINES) * 4, LINES[1]], 0
    for line in lines:
        prompt = chat(monkeypatch, [line], *options, "--store", tmp_path / "store")[0]
        assert requests[-1].stats.cached_tokens == stored
        stored = len(prompt) - 1
    chat(monkeypatch, lines, *options, "--store", tmp_path / "other")
    assert talk_of(tmp_path / "store") == talk_of(tmp_path / "other")


def test_bytes_that_are_no_utf8_do_not_end_a_talk(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [b"caf\xe9".decode(errors="surrogateescape"), LINES[0]]
    chat(monkeypatch, lines, model, "--store", tmp_path, "--max-tokens", 3)
    assert [message["content"] for message in talk_of(tmp_path)][::2] == ["caf?", LINES[0]]


def test_what_is_said_in_thoughts(
    endless: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """This template opens them, and the model never closes them: there is no answer to keep."""
    options = [endless, "--chat-template", TEMPLATES["wide_bars"], "--store", tmp_path]
    chat(monkeypatch, LINES[:1], *options, "--max-tokens", 4)
    _, answer = talk_of(tmp_path)
    assert answer["content"] == "" and answer["reasoning_content"]
    assert answer["reasoning_content"].strip() in capsys.readouterr().out


def test_commands(
    chatml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    lines = ["/stats", "/regenerate", "/undo", "/system Be brief.", LINES[0], "/set seed 5",
             "/regenerate", "/stats", LINES[1], "/undo", "/set temperature -1",
             "/set top-p", "/set mood 3", "/set max-tokens 2", "/set", "/what",
             "/help", "/system", LINES[2], "/exit", "never"]  # fmt: skip
    options = [chatml, "--store", tmp_path, "--seed", 1, "--max-tokens", 6]
    prompts = chat(monkeypatch, lines, *options)
    told = capsys.readouterr().out
    for text in ("There is no answer yet.", "There is nothing to undo.", "Forgotten: And God said",
                 "top-p is ''; expected a number", "There is no mood; expected one of temperature",
                 "max-tokens is 2.", "There is no /what", "/regenerate            answer",
                 "There is no system message.", "temperature is -1",
                 "tokens a second"):  # fmt: skip
        assert text in told, text
    messages = talk_of(tmp_path)
    assert [m["content"] for m in messages[::2]] == [LINES[0], LINES[2]]
    system = [{"role": "system", "content": "Be brief."}]
    template = TEMPLATES["chatml_default_system"]
    whole = [p for p in prompts if len(p) > 1]  # but for those that try a setting
    assert whole[0] == whole[1] == rendered(template, [*system, messages[0]])
    assert whole[-1] == rendered(template, messages[:3])
    chat(monkeypatch, ["/clear", LINES[0]], *options)
    assert [m["content"] for m in talk_of(tmp_path)][:1] == [LINES[0]]
    assert len(talk_of(tmp_path)) == 2


def test_seeds_and_answers_again(
    chatml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seed gives the same talk; another answer to the same line is another one."""
    options = [chatml, "--seed", 7, "--max-tokens", 8, "--temperature", 1.5]
    answers = []
    for name in ("a", "b"):
        chat(monkeypatch, [LINES[0]], *options, "--store", tmp_path, "--session", name)
        answers.append(talk_of(tmp_path, name)[-1]["content"])
    chat(monkeypatch, ["/regenerate"], *options, "--store", tmp_path, "--session", "b")
    assert answers[0] == answers[1] != talk_of(tmp_path, "b")[-1]["content"]


def test_a_talk_that_the_model_has_no_room_for(
    endless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    options = [endless, "--store", tmp_path, "--context", 64, "--max-tokens", 900]
    chat(monkeypatch, [LINES[0], LINES[1]], *options, status=1)
    error = capsys.readouterr().err
    assert "expected at most 63: /clear or /undo makes room" in error
    assert len(talk_of(tmp_path)) == 2


def test_what_a_template_refuses(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [model, "--chat-template", TEMPLATES["turns"], "--store", tmp_path, "--system", "x"]
    chat(monkeypatch, LINES[:1], *options, status=1)
    assert "the chat template failed: there is no system role" in capsys.readouterr().err


def test_talks_are_kept_token_by_token(
    chatml: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The store's session has the tokens of the talk, and is rewound where it parts from them."""
    from lmdecode.serving import TextModel
    from lmdecode.store import KVStore

    options = [chatml, "--store", tmp_path, "--max-tokens", 5, "--temperature", 0]
    long = "And it came to pass, " * 30
    prompts = chat(monkeypatch, [long, LINES[1]], *options)
    chat(monkeypatch, ["/undo", LINES[2], "/stats"], *options)
    kept = int(re.findall(r"(\d+) of them kept", capsys.readouterr().out)[-1])
    loaded = TextModel.load(chatml)
    fingerprint = loaded.decoding.fingerprint(loaded.tokenizer)
    with KVStore(tmp_path, fingerprint=fingerprint, readonly=True) as store:
        tokens = store.session("chat").tokens
    expected = rendered(TEMPLATES["chatml_default_system"], talk_of(tmp_path)[:3])
    assert tokens[: len(expected)] == expected and len(tokens) == len(expected) + 5
    assert kept > len(prompts[0]) // 2  # the first line was not read again


class Terminal:
    """``lmdecode chat`` on a terminal."""

    def __init__(self, *arguments: object) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "lmdecode", "chat", *map(str, arguments)]
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment,
            start_new_session=True, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(slave)
        self.text = ""

    def until(self, pattern: str, timeout: float = 120) -> str:
        """Read until a pattern comes; return what came, and forget it."""
        end = time.monotonic() + timeout
        while not (found := re.search(pattern, self.text)):
            ready, _, _ = select.select([self._master], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.text!r}"
            try:
                data = os.read(self._master, 4096)
            except OSError:
                data = b""
            assert data, f"it ended before {pattern!r}: {self.text!r}"
            self.text += data.decode(errors="replace").replace("\r", "")
        text, self.text = self.text[: found.end()], self.text[found.end() :]
        return text

    def write(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C once the process waits for a line: Python loses one that comes before."""
        stat, waited = Path(f"/proc/{self.process.pid}/stat"), 0
        while waited < 10:
            time.sleep(0.01)
            waited = waited + 1 if stat.read_text().rpartition(") ")[2].startswith("S") else 0
        self.write("\x03")

    def ends(self) -> int:
        """Read to the end; return the exit status."""
        while True:
            try:
                data = os.read(self._master, 4096)
            except OSError:
                break
            if not data:
                break
            self.text += data.decode(errors="replace")
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


def _take_terminal() -> None:
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever runs in the background ignores it

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def opened(terminals: list[Terminal], *arguments: object) -> Terminal:
    terminals.append(Terminal(*arguments))
    return terminals[-1]


@pytest.mark.slow
def test_interrupts_end_answers_and_not_the_talk(
    endless: Path, tmp_path: Path, terminals: list[Terminal]
) -> None:
    options = ["--store", tmp_path, "--max-tokens", 4000, "--temperature", 1.0]
    terminal = opened(terminals, endless, *options)
    terminal.until("ends the talk")
    terminal.until("> ")
    terminal.write("In the beginning\n")
    # It answers, on any number of lines; the line of a prompt that is still read is no answer.
    terminal.until(r"(?s)beginning\n(?:.*\x1b\[2K)?\s*(?!Reading)(?:\w+\W+){3}")
    terminal.write("\x03")
    terminal.until(r"\n> ")
    first = talk_of(tmp_path)
    assert len(first) == 2 and first[1]["content"]
    terminal.write("/set max-tokens 3\n")
    terminal.until("max-tokens is 3")
    terminal.write("And God said\n")
    terminal.until(r"cut at 3 tokens")
    terminal.until(r"\n> ")
    messages = talk_of(tmp_path)
    assert messages[:2] == first and len(messages) == 4
    terminal.interrupt()
    terminal.until("Ctrl-C once more, or Ctrl-D, ends the talk")
    terminal.until("> ")
    terminal.interrupt()
    assert terminal.ends() == 0
    assert "Traceback" not in terminal.text
    assert talk_of(tmp_path) == messages


@pytest.mark.slow
def test_a_second_chat_while_the_first_runs(
    endless: Path, tmp_path: Path, terminals: list[Terminal]
) -> None:
    options = ["--store", tmp_path, "--max-tokens", 4]
    first = opened(terminals, endless, *options)
    first.until("> ")
    first.write("In the beginning\n")
    first.until("cut at 4 tokens")
    first.until("> ")
    # The same talk: it is read, and not kept. Another one is kept.
    done = run_python("-m", "lmdecode", "chat", endless, *options, input="And\n")
    assert done.returncode == 0, done.stderr
    assert "The talk 'chat' goes on elsewhere: this one is not kept." in done.stdout
    assert "It goes on behind" in done.stdout and len(talk_of(tmp_path)) == 2
    done = run_python(
        "-m", "lmdecode", "chat", endless, *options, "--session", "other", input="And\n"
    )
    assert done.returncode == 0, done.stderr
    assert "elsewhere" not in done.stdout and not done.stderr
    assert len(talk_of(tmp_path, "other")) == 2
    first.write("And he said\n")
    first.until("cut at 4 tokens")
    first.until("> ")
    assert len(talk_of(tmp_path)) == 4
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait()
    done = run_python("-m", "lmdecode", "chat", endless, *options, input="And\n")
    assert done.returncode == 0, done.stderr
    assert "goes on behind" in done.stdout and len(talk_of(tmp_path)) == 6


def test_a_store_of_one_writer_is_read(
    chatml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from lmdecode.serving import TextModel
    from lmdecode.store import KVStore

    loaded = TextModel.load(chatml)
    fingerprint = loaded.decoding.fingerprint(loaded.tokenizer)
    with KVStore(tmp_path, fingerprint=fingerprint, capacity_bytes=1 << 24):
        chat(monkeypatch, LINES[:1], chatml, "--store", tmp_path, "--max-tokens", 3)
    assert "Another program writes the store: " in capsys.readouterr().out
    assert len(talk_of(tmp_path)) == 2


def test_names_of_talks(tmp_path: Path) -> None:
    names = ["a", "a.b", "../a", "a/b", "%2E", "\u00e9" * 90, "x" * 300, "x" * 301, ""]
    files = [TalkFile(tmp_path, name, "key", "M") for name in names]
    for i, file in enumerate(files):
        assert file.take() and file.read() == []
        file.write([{"role": "user", "content": str(i)}])
        assert file.path.parent == tmp_path and len(file.path.name) < 200
    assert [file.read()[0]["content"] for file in files] == [str(i) for i in range(len(files))]
    other = TalkFile(tmp_path, "a", "other", "N")
    assert other.of_others() == ["M"] and other.read() == []
    assert not TalkFile(tmp_path, "a", "key", "M").take()
    files[0].leave()
    assert TalkFile(tmp_path, "a", "key", "M").take()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 1}', '{"version": 2, "messages": []}',
             '{"version": 1, "messages": [{"role": "user", "content": 3}]}']
)  # fmt: skip
def test_damaged_talks(
    text: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    chat(monkeypatch, LINES[:1], model, "--store", tmp_path, "--max-tokens", 1)
    (path,) = (tmp_path / "talks").glob("*.json")
    path.write_text(text)
    capsys.readouterr()
    chat(monkeypatch, LINES[:1], model, "--store", tmp_path, status=1)
    error = capsys.readouterr().err
    assert error.startswith(f"lmdecode chat: the talk in {path} is ") and error.count("\n") == 1
    assert path.read_text() == text


def test_a_talk_that_is_not_kept() -> None:
    talk = Talk([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    talk.set_system("s")
    assert talk.system == "s" and talk.num_turns == 1
    assert talk.undo() == "a" and talk.undo() is None
    assert talk.messages == [{"role": "system", "content": "s"}]
    talk.clear()
    assert talk.system == "s"
    talk.set_system("")
    assert talk.messages == []
    assert json.dumps(talk.with_line("x")) == '[{"role": "user", "content": "x"}]'


store_module = pytest.importorskip("lmdecode.store")


def _refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a chat that does not begin."""
    capsys.readouterr()  # of what the test did before
    assert main(["chat", *map(str, arguments)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("lmdecode chat: ") and error.count("\n") == 1
    return error


def test_stores_that_cannot_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x"
    assert f"--store {path}: " in _refused(capsys, KJV, "--store", path)
    loaded = TextModel.load(KJV)
    fingerprint = loaded.decoding.fingerprint(loaded.tokenizer)
    path = tmp_path / "store"
    store_module.KVStore(path, fingerprint=fingerprint, capacity_bytes=1 << 24).close()
    (path / fingerprint.name / "index.sqlite").write_text("no index")
    assert f"--store {path}: " in _refused(capsys, KJV, "--store", path)


def test_talks_in_other_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--store", tmp_path / "store", "--max-tokens", 3]

    def talk(model: Path, session: str, *dtype: str) -> str:
        chat(monkeypatch, ["In the"], model, *options, "--session", session, *dtype)
        return capsys.readouterr().out

    assert "begins anew" not in talk(KJV, "a")
    assert "It goes on behind" in talk(KJV, "a", "--dtype", "int8")
    text = talk(KJV, "a", "--dtype", "bfloat16")
    assert "It begins anew: the talk 'a' there is of " in text and ", int8, " in text
    assert "begins anew" not in talk(KJV, "b", "--dtype", "float32")
    saved = tmp_path / "saved"
    lmdecode.Decoding.from_pretrained(KJV, "bfloat16", keep_model=False).save(saved)
    assert "It goes on behind" in talk(saved, "a", "--dtype", "bf16")


def test_a_model_that_is_none_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    error = _refused(capsys, tmp_path, "--store", tmp_path / "store")
    assert "tokenizer.json" in error
    (tmp_path / "tokenizer.json").write_bytes((KJV / "tokenizer.json").read_bytes())
    error = _refused(capsys, tmp_path, "--store", tmp_path / "store")
    assert "has a model of type 'bert'; expected" in error
