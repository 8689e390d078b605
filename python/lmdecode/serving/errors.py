"""Errors of the HTTP interface, in the shapes of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Mapping
from typing import Any

from lmdecode._checks import Error

__all__ = [
    "BadRequest", "RequestError", "anthropic_body", "error_of_engine", "error_of_step", "reason_of",
]  # fmt: skip

logger = logging.getLogger("lmdecode.serving")

_OF_OP = re.compile(r"\A[A-Za-z]\w*(\.\w+)*: ")
# Characters of a message: its beginning, which says where, and its end, which says what was wrong.
_MOST_BEGIN, _MOST_END = 110, 87

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_OF_ANTHROPIC = {
    **_KINDS,
    403: "permission_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


class RequestError(Error):
    """A request that gets no answer, with HTTP's ``status``.

    ``param`` is the field of the body, and ``code`` OpenAI's word for the error. A message of more
    than 200 characters, as one that holds input may have, loses those in the middle.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > _MOST_BEGIN + 3 + _MOST_END:
            message = f"{message[:_MOST_BEGIN]}...{message[-_MOST_END:]}"
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def body_at(self, path: str) -> dict[str, Any]:
        """Return the JSON as the protocol of a path has it."""
        return anthropic_body(self) if f"{path}/".startswith("/v1/messages/") else self.body


def anthropic_body(error: RequestError) -> dict[str, Any]:
    """Return the JSON of an error as Anthropic's API has it."""
    kind = _OF_ANTHROPIC.get(error.status, "invalid_request_error")
    inner = {"type": kind, "message": str(error)}
    return {"type": "error", "error": inner, "request_id": f"req_{uuid.uuid4().hex}"}


class BadRequest(RequestError, ValueError):
    """A request with a wrong field: status 400; ``param`` names the field."""

    def __init__(self, param: str | None, message: str, code: str | None = None) -> None:
        super().__init__(400, message, param, code)


def reason_of(error: Exception) -> str:
    """Return what an error of the library says, without the name of the op at its beginning."""
    return _OF_OP.sub("", str(error))


def error_of_engine(error: Exception, names: Mapping[str, str]) -> BadRequest:
    """Return the error of a request whose arguments an ``Engine`` refused.

    The engine's error begins with the op and names the argument, as in "Engine.submit: top_p is 3;
    expected ..."; ``names`` maps arguments to fields of the body.
    """
    message = reason_of(error)
    argument = message.split(" ", 1)[0].split("[", 1)[0]
    field = names.get(argument, argument)
    if field != argument:
        message = field + message.removeprefix(argument)
    return BadRequest(field, message)


def error_of_step(error: Exception) -> RequestError:
    """Return the error of an answer that failed, which is the server's fault but for two."""
    message = str(error)
    if isinstance(error, RuntimeError) and "no logit above -inf" in message:  # its rules leave none
        return BadRequest(None, f"the parameters of the request leave no token: {message}")
    if isinstance(error, (RuntimeError, ValueError)) and message.startswith("the grammar "):
        return BadRequest(None, message)  # of a GrammarState: the request's grammar needs too much
    logger.error("an answer failed", exc_info=error)
    return RequestError(500, "the server failed; its log has the reason", code="server_error")
