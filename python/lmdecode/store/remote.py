"""``Remote``: where a store's second tier is, and how long to wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

from lmdecode._checks import check_int, check_number, install_hint

_SCHEMES = ("redis", "rediss", "unix")


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A Redis or Valkey server, or cluster, as second tier of the local store.

    Attributes
    ----------
    url
        ``redis://[user:password@]host:port/db``, ``rediss://`` for TLS, or
        ``unix://[user:password@]/path/of/socket?db=0``; options of redis-py's ``from_url`` may
        follow, as ``?ssl_ca_certs=/path``. It is never printed.
    cluster
        The server is a node of a Redis Cluster.
    ttl
        Seconds after which the server forgets an entry that was not stored again; None: never.
    timeout
        Seconds that a lookup waits for the next entries. After that the server counts as gone, and
        nothing waits for it until it has answered in the background.
    max_wait
        Seconds of one lookup altogether, and of ``close`` for what is still to be written; what has
        arrived by then serves.
    cool_down
        Seconds between two questions, in the background, whether a server that was gone is back.
    max_pending
        Prefixes that wait to be written; more are dropped, and counted.

    Raises
    ------
    ValueError
        The URL has another scheme, or a number is not positive.
    TypeError
        The URL is no str, or a number is none; only ``ttl`` may be None.
    """

    url: str = field(repr=False)
    cluster: bool = False
    ttl: float | None = 7 * 24 * 3600.0
    timeout: float = 0.5
    max_wait: float = 30.0
    cool_down: float = 5.0
    max_pending: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise TypeError(f"Remote: url is of type {type(self.url).__name__}; expected a str")
        scheme = urlsplit(self.url).scheme  # the rest may hold a password
        if scheme not in _SCHEMES:
            expected = ", ".join(f"{known}://" for known in _SCHEMES)
            raise ValueError(
                f"Remote: url has another scheme, {scheme!r}; expected one of {expected}"
            )
        for name in ("ttl", "timeout", "max_wait", "cool_down", "max_pending"):
            value = getattr(self, name)
            if name == "ttl" and value is None:
                continue
            if name == "max_pending":
                check_int("Remote", name, value, 1, kind="int", limits="a positive number")
            elif not check_number("Remote", name, value, kind="int or float") > 0:
                raise ValueError(f"Remote: {name} is {value}; expected a positive number")

    @property
    def location(self) -> str:
        """The URL without user, password and options."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return f"{parts.scheme}://{host}{parts.path}"

    def connector(self) -> Callable[[], Any]:
        """Return a factory of clients. Only calling it connects.

        Raises
        ------
        ImportError
            redis-py is not installed.
        ValueError
            redis-py cannot parse the URL.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.cluster import RedisCluster
            from redis.retry import Retry
        except ImportError as error:
            raise ImportError(
                f"KVStore: remote= needs redis-py: {install_hint('redis')}"
            ) from error
        try:
            redis.connection.parse_url(self.url)
        except (ValueError, TypeError):
            # Without the cause, which may quote the URL.
            raise ValueError(f"Remote: redis-py cannot read url: {self.location}") from None
        kind = RedisCluster if self.cluster else redis.Redis
        return partial(
            kind.from_url,
            self.url,
            socket_timeout=self.timeout,
            socket_connect_timeout=self.timeout,
            retry=Retry(NoBackoff(), 0),  # one timeout bounds a call, not several
            decode_responses=False,
        )

    def without_secrets(self, text: str) -> str:
        """``text`` with user name and password blotted out."""
        parts = urlsplit(self.url)
        for secret in (parts.password, parts.username):
            if secret:
                text = text.replace(secret, "***").replace(unquote(secret), "***")
        return text
