"""What endpoints share: bodies within limits, clients that go away, events, errors, keys."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lmdecode.serving.errors import BadRequest, RequestError, error_of_step

__all__ = [
    "EventStream", "JSONAnswer", "KeyCheck", "OriginCheck", "PlainPaths", "path_of", "read_body",
    "read_form", "unless_gone",
]  # fmt: skip

_T = TypeVar("_T")
_MOST_DISCARDED = 1 << 30
_MOST_SILENCE = 10.0  # seconds, after which clients and proxies are told that a stream goes on


def _json(content: Any) -> bytes:
    # Lone surrogates cannot be written otherwise; a decoder replaces bytes of no character.
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", errors="replace")


def path_of(scope: Scope) -> str:
    """Return the path of a request within this application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class JSONAnswer(Response):
    """A body of JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the bytes of a body."""
        return _json(content)

    @classmethod
    def of_error(cls, error: RequestError, path: str) -> JSONAnswer:
        """Return the response for an error, in the shape that a path has."""
        return cls(error.body_at(path), error.status, error.headers)


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """Return the body of a request.

    Raises ``RequestError`` with status 413 for more than ``most`` bytes, and with 408 where they
    take longer than ``seconds``.
    """
    parts, count = [], 0
    try:
        async with asyncio.timeout(seconds):
            # What is too large is read all the same: a client that still sends hears no answer.
            async for part in request.stream():
                count += len(part)
                if count <= most:
                    parts.append(part)
                elif count > _MOST_DISCARDED:
                    break
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} seconds"
        raise RequestError(408, message, "body", "request_timeout") from None
    if count > most:
        message = f"the body is too large; expected at most {most} bytes"
        raise RequestError(413, message, "body", "body_too_large")
    return b"".join(parts)


async def read_form(request: Request, most: int, seconds: float) -> list[tuple[str, str | bytes]]:
    """Return the parts of a form, of which at most one is a file: texts, and bytes of the file.

    Raises ``RequestError`` with status 400, 413 or 408: no form, too large, too slow.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise BadRequest("body", "the body is no form; expected multipart/form-data")
    data = await read_body(request, most, seconds)

    async def parts() -> AsyncGenerator[bytes, None]:
        yield data
        yield b""

    try:
        form = await MultiPartParser(request.headers, parts(), max_files=1, max_fields=64).parse()
    except (MultiPartException, KeyError, UnicodeError, ValueError) as error:
        raise BadRequest("body", f"the body is no form: {error}") from error
    found = []
    for name, value in form.multi_items():
        found.append((name, value if isinstance(value, str) else await value.read()))
    await form.close()
    return found


async def _gone(receive: Receive) -> None:
    """Return when the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, answer: Awaitable[_T]) -> _T:
    """Return an answer; cancel it and raise ``ClientDisconnect`` if its client goes away."""
    writing = asyncio.ensure_future(answer)
    listening = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((writing, listening), return_when=asyncio.FIRST_COMPLETED)
        if writing.done():
            return writing.result()
        raise ClientDisconnect
    finally:
        for task in (writing, listening):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(writing, listening, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, one for each body, and ``[DONE]`` at the end.

    ``close`` is called at the end, also when the client goes away. ``is_named``: each event has the
    type of its body as its name, and the last body is the end. Where no event comes for long, as
    while a prompt is read, ``ping`` is sent, or a comment, which every client skips.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        close: Callable[[], None],
        is_named: bool = False,
        ping: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close, self._is_named = events, close, is_named
        self._filler = b": keep-alive\n\n" if ping is None else self._event(ping)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            with suppress(ClientDisconnect):
                await unless_gone(receive, self._send(send))
        finally:
            self._close()

    def _event(self, content: dict[str, Any]) -> bytes:
        name = f"event: {content['type']}\n" if self._is_named else ""
        return name.encode() + b"data: " + _json(content) + b"\n\n"

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        now = asyncio.get_running_loop().time
        last = now()

        async def write(body: bytes) -> None:
            nonlocal last
            last = now()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        async def fill() -> None:
            with suppress(OSError):  # the client has gone
                while True:
                    await asyncio.sleep(last + _MOST_SILENCE - now())
                    if now() >= last + _MOST_SILENCE:
                        await write(self._filler)

        filling = asyncio.create_task(fill())
        try:
            async for content in self._events:
                await write(self._event(content))
        except OSError:  # the client has gone
            raise ClientDisconnect from None
        except Exception as error:
            await write(b"data: " + _json(error_of_step(error).body) + b"\n\n")
        finally:
            filling.cancel()
        if not self._is_named:
            await write(b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class PlainPaths:
    """Takes a path with slashes twice, or with one at its end, as the path without.

    Clients put them there where they join an address that ends with a slash.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] == "http":
            path = re.sub("/+", "/", scope["path"])
            scope = {**scope, "path": path.removesuffix("/") or "/"}
        await self._app(scope, receive, send)


class KeyCheck:
    """Refuses requests without the key, except for ``open_paths``.

    The key is compared in constant time with the token of ``Authorization: Bearer`` and with
    ``x-api-key``.
    """

    def __init__(self, app: ASGIApp, key: str, open_paths: tuple[str, ...]) -> None:
        self._app, self._key, self._open = app, key.encode(), open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http" or path_of(scope) in self._open or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = (token.strip() if kind.lower() == "bearer" else "", headers.get("x-api-key", ""))
        data = [text.encode("latin-1", "replace") for text in given if text]
        if any([hmac.compare_digest(one, self._key) for one in data]):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            401, "the API key is missing or wrong; expected it as Authorization: Bearer KEY",
            code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip
        await JSONAnswer.of_error(error, path_of(scope))(scope, receive, send)


def _is_loopback(host: str) -> bool:
    """Whether a host, with a port or without, is this machine by its name or address."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name.endswith(".localhost") or ip_address(name).is_loopback
    except ValueError:
        return False


class OriginCheck:
    """Refuses requests of web pages, except for those of ``origins`` ("*": all).

    A browser lets any page send a form to this machine; it only keeps the answer from the page. A
    page whose name leads to this machine (DNS rebinding) would also get the answer: without a key,
    a page that asks at a loopback address must have a name of this machine.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...], has_key: bool) -> None:
        self._app, self._origins, self._has_key = app, frozenset(origins), has_key

    def _is_own(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is None:
            return True
        if origin.partition("://")[2] != host:
            return False
        address = (scope.get("server") or ("", None))[0]
        return self._has_key or not _is_loopback(address) or _is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] == "http" and scope["method"] == "POST":
            allowed = {Headers(scope=scope).get("origin"), "*"}
            if not self._is_own(scope) and not self._origins & allowed:
                error = RequestError(
                    403, "a web page of another origin may not ask", code="origin_not_allowed"
                )
                await JSONAnswer.of_error(error, path_of(scope))(scope, receive, send)
                return
        await self._app(scope, receive, send)
