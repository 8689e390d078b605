"""The application of a replica: declared before there is a model, and set when there is.

In a module of its own: Ray copies the deployment's class with the globals that it uses, but
imports what is here.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["ReplicaApp", "set_replica_app"]

_of_this_process: list[ASGIApp] = []


def set_replica_app(app: ASGIApp) -> None:
    """Let the replica of this process answer with an application."""
    _of_this_process[:] = [app]


class ReplicaApp:
    """Hands requests to the application that was set in this process."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or the protocol of an application's life."""
        if scope["type"] != "lifespan":
            await _of_this_process[0](scope, receive, send)
            return
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
