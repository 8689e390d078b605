"""``lmdecode serve``: a model behind OpenAI's and Anthropic's APIs, on this machine."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from lmdecode._checks import install_hint
from lmdecode.cli import COMMANDS
from lmdecode.cli.client_configs import CONFIGS, Client, first_lines
from lmdecode.cli.errors import CommandError
from lmdecode.cli.options import add_draft_option, add_model_options, check_at_least_1

if TYPE_CHECKING:
    from lmdecode.serving.app import Application
    from lmdecode.serving.text_model import TextModel

__all__ = ["add_command"]

_CAPACITY = 8192  # tokens of a text of an encoder-decoder model, where --context is not given
_MOST_DRAFTED = 8  # tokens of a draft, and a few more
_OF_MEMORY = 4  # the machine's, of which keys and values may have one part
_KEY_VARIABLE = "LMDECODE_API_KEY"
_BACKLOG = 2048  # connections that wait to be accepted
_M_ARENA_MAX, _ARENAS = -8, 2  # of glibc's mallopt


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "serve",
        help=COMMANDS["serve"],
        usage="lmdecode serve MODEL [options]",
        description="OpenAI's and Anthropic's APIs at /v1, a page at /, metrics at /metrics.",
    )
    add_model_options(parser, is_needed=False)
    add_draft_option(parser)
    add = parser.add_argument
    add("--speech", metavar="MODEL", help="a Whisper model beside it, for /v1/audio")
    add("--host", default="127.0.0.1", help="address (default 127.0.0.1: this machine alone)")
    add("--port", type=int, default=8000, metavar="N", help="default 8000; 0: any free one")
    add("--name", help="of the model, for clients")
    add("--api-key", metavar="KEY", help=f"clients must have it; also {_KEY_VARIABLE}")
    add("--max-requests", type=int, default=32, metavar="N", help="answered at once (default 32)")
    add("--max-waiting", type=int, default=256, metavar="N", help="waiting beside (default 256)")
    add("--memory-gb", type=float, metavar="X",
        help="the most of keys and values (default a quarter of all)")  # fmt: skip
    add("--store", metavar="DIR", help="keep keys and values of prompts there")
    add("--store-gb", type=float, default=16.0, metavar="X", help="the most of it (default 16)")
    add("--cors", action="append", default=[], metavar="ORIGIN", help="a web page that may ask")
    add("--grace", type=float, default=30.0, metavar="S", help="seconds to finish at SIGTERM")
    add("--no-page", action="store_true", help="nothing at /")
    add("--log-requests", action="store_true", help="a line for each request")
    add("--print-config", choices=CONFIGS, metavar="FOR",
        help="codex, claude-code, opencode or open-webui; and end")  # fmt: skip
    parser.set_defaults(run=_run)


def _check(given: argparse.Namespace) -> None:
    check_at_least_1(given, "max_requests", "context", "threads")
    for name, low, high in (("max_waiting", 0, 1 << 31), ("port", 0, 65535), ("grace", 0, 1e9),
                            ("store_gb", 0, 1e9), ("memory_gb", 1e-3, 1e6)):  # fmt: skip
        value = getattr(given, name)
        if value is not None and not low <= value <= high:
            option = name.replace("_", "-")
            raise CommandError(f"--{option} is {value}; expected {low:g} to {high:g}")
    for origin in given.cors:
        if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise CommandError(
                f"--cors is {origin!r}; expected one such as http://example.com, or *"
            )


def _share_arenas() -> None:
    """Let the threads of a server share arenas of glibc's malloc.

    A grammar is made by one thread, copied by another and freed by a third; each thread's own
    arena would keep the holes. It does nothing where MALLOC_ARENA_MAX says how many there are, or
    where there is no glibc.
    """
    if "MALLOC_ARENA_MAX" in os.environ or not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_ARENA_MAX, _ARENAS)


def _bound_socket(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:
        raise CommandError(f"cannot listen on {host}, port {port}: {error}") from error
    return bound


def _is_speech(model: str) -> bool:
    """Whether a folder has a Whisper model, of transformers or of CTranslate2."""
    from lmdecode.serving.tokenizer import read_json

    config = read_json(Path(model).expanduser() / "config.json")
    return config.get("model_type") == "whisper" or "suppress_ids_begin" in config


def _load(given: argparse.Namespace, app: Application, closing: contextlib.ExitStack) -> None:
    """Load the models, and let the application have them."""
    speech = given.speech
    if speech is None and _is_speech(given.model):
        speech = given.model
    if speech is not None:
        from lmdecode.cli.options import be_quiet, set_threads
        from lmdecode.serving.speech import SpeechService
        from lmdecode.speech import Transcriber

        set_threads(given)
        be_quiet()
        transcriber = Transcriber(speech, given.dtype or "int8")
        service = SpeechService(transcriber, given.max_waiting)
        closing.callback(service.close)
        if given.speech is not None:
            _load_text(given, app, closing)
        app.speech = service
    else:
        _load_text(given, app, closing)


def _load_text(given: argparse.Namespace, app: Application, closing: contextlib.ExitStack) -> None:
    from lmdecode.cli.options import drafts_of, load_model
    from lmdecode.serving.service import Service
    from lmdecode.serving.text_model import is_causal

    model = load_model(given)
    sizes = _sizes(given, model)
    store = None
    if given.store is not None:
        if not is_causal(model.decoding):
            raise CommandError("--store is given; expected a decoder-only model with it")
        from lmdecode.store import KVStore

        folder = Path(given.store).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        store = closing.enter_context(
            KVStore(
                folder,
                fingerprint=model.decoding.fingerprint(model.tokenizer),
                directory_bytes=int(given.store_gb * (1 << 30)),
                writers="many",
                durability="relaxed",
            )
        )
    engine = model.decoding.engine(
        max_requests=given.max_requests, store=store, **sizes, **drafts_of(given, model)
    )
    engine.start()
    closing.callback(engine.stop)
    app.service = Service(model, engine, app.name, given.max_waiting, store, app.tally)


def _sizes(given: argparse.Namespace, model: TextModel) -> dict[str, Any]:
    """Return the most tokens of a text, and the most bytes of all."""
    from lmdecode.cli.options import capacity_of
    from lmdecode.decoder.engine.steps import longest_text
    from lmdecode.models.packed_causal import PackedCausalModel

    decoder = model.decoding.decoder
    if not isinstance(decoder, PackedCausalModel):
        if given.memory_gb is not None:
            raise CommandError("--memory-gb is given; expected a decoder-only model with it")
        return {"capacity": capacity_of(given, model, _CAPACITY)}
    capacity = capacity_of(given, model, None)
    if given.memory_gb is None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _OF_MEMORY
    else:
        memory = int(given.memory_gb * (1 << 30))
    # The layer or the model that drafts goes back, too: a few more states.
    rollback = 0 if given.draft is None else _MOST_DRAFTED
    fits = longest_text(decoder, model.decoding.cache_dtype, memory, capacity, rollback)
    if (given.context is not None and fits < capacity) or fits < 1:
        raise CommandError(
            f"--context is {capacity}, and --memory-gb {memory / (1 << 30):.3g} holds {fits} "
            "tokens; expected a shorter context, or more memory"
        )
    return {"capacity": min(capacity, fits), "cache_bytes": memory}


def _told(app: Application) -> str:
    """Return how long texts may be, and the memory that they may take."""
    if app.service is None:
        return ""
    engine = app.service.engine
    told = f": texts of up to {app.service.context} tokens"
    if engine.cache_bytes is not None:
        told += f", keys and values in up to {engine.cache_bytes / (1 << 30):.3g} GB"
    return told


def _client(given: argparse.Namespace, host: str, port: int, context: int | None) -> Client:
    """Return the server as its clients see it."""
    from lmdecode.serving.text_model import name_of

    name = given.name or ("MODEL" if given.model is None else name_of(given.model))
    address = f"[{host}]" if ":" in host else host
    has_key = bool(given.api_key or os.environ.get(_KEY_VARIABLE))
    return Client(f"http://{address}:{port}", name, has_key, context, _KEY_VARIABLE)


def _run(given: argparse.Namespace) -> int:
    _check(given)
    if given.print_config is not None:
        print(CONFIGS[given.print_config](_client(given, given.host, given.port, given.context)))
        return 0
    if given.model is None:
        raise CommandError("MODEL is missing; expected a model to serve")
    _share_arenas()
    try:
        import uvicorn

        from lmdecode.serving.app import Application
    except ImportError as error:
        raise CommandError(f"{error.name} is not installed: {install_hint('serve')}") from error
    from lmdecode.serving.text_model import name_of

    name = given.name or name_of(given.model)
    speech_name = None if given.speech is None else name_of(given.speech)
    key = given.api_key or os.environ.get(_KEY_VARIABLE) or None
    app = Application(
        name, speech_name=speech_name, api_key=key, cors_origins=given.cors,
        has_page=not given.no_page,
    )  # fmt: skip
    bound = _bound_socket(given.host, given.port)
    host, port = bound.getsockname()[:2]
    config = uvicorn.Config(
        app.app,
        log_level="info" if given.log_requests else "warning",
        access_log=given.log_requests,
        lifespan="off",
        timeout_graceful_shutdown=int(given.grace),
        server_header=False,
    )
    failures: list[BaseException] = []

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.is_stopping = True
            self.force_exit = self.should_exit  # it was asked before
            self.should_exit = True

    server = Server(config)
    with contextlib.ExitStack() as closing:

        def load() -> None:
            try:
                _load(given, app, closing)
            except BaseException as error:
                failures.append(error)
                server.should_exit = True
                return
            if app.is_stopping:
                return
            service = app.service
            client = _client(given, host, port, None if service is None else service.context)
            lines = [f"lmdecode serves {name} at {client.address}{_told(app)}"]
            if service is not None and service.model.template is not None:
                lines.append(first_lines(client, port))
            print("\n".join(lines), flush=True)

        loading = threading.Thread(target=load, name="lmdecode loading", daemon=True)
        loading.start()
        # Two threads take turns at every token that streams: the one that steps, and this one.
        sys.setswitchinterval(0.001)
        bound.listen(_BACKLOG)
        server.run([bound])
        if server.force_exit or (loading.is_alive() and not failures):
            os._exit(1)
        loading.join()
    if failures:
        raise failures[0]
    return 0
