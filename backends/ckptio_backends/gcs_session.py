"""gcsfs as the source of credentials, endpoint and HTTP session, and what its options may be."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ckptio.errors import DriverUnavailableError, InvalidOptionError

try:
    import aiohttp
    import fsspec.asyn
    from gcsfs.core import GCSFileSystem
    from google.oauth2.credentials import Credentials
except ImportError as error:
    raise DriverUnavailableError(
        f"gs:// needs gcsfs ({error}): pip install 'ckptio[gcs]'"
    ) from error

__all__ = ["check_options", "open_session"]

_USED = {
    "access", "endpoint_url", "project", "requester_pays", "requests_timeout", "session_kwargs",
    "timeout", "token",
}  # fmt: skip
_NO_MEANING_HERE = {
    "asynchronous", "batch_size", "block_size", "cache_timeout", "check_connection", "consistency",
    "default_block_size", "default_cache_type", "default_location", "listings_expiry_time", "loop",
    "max_paths", "secure_serialize", "skip_instance_cache", "use_listings_cache", "version_aware",
}  # fmt: skip
_METHODS = {None, "anon", "cache", "cloud", "google_default"}


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that gcsfs does not have, or that cannot work.

    Raises
    ------
    InvalidOptionError
        Naming them.
    """
    if unknown := sorted(options.keys() - _USED - _NO_MEANING_HERE):
        raise InvalidOptionError(
            f"gs:// has no storage options {unknown}; it takes gcsfs's: {sorted(_USED)}"
        )
    access = options.get("access", "full_control")
    if access not in GCSFileSystem.scopes:
        raise InvalidOptionError(f"access is {access!r}; one of {sorted(GCSFileSystem.scopes)}")
    endpoint = options.get("endpoint_url")
    if endpoint is not None and not re.match(r"https?://[^/]+/?$", str(endpoint)):
        raise InvalidOptionError("endpoint_url has to be http://host:port or https://host:port")


class _FileSystem(GCSFileSystem):  # type: ignore[misc]  # gcsfs ships no types
    """gcsfs with another way to close a session that was left open.

    Its own calls the event loop from a foreign thread, and a forked child's copy of that loop. The
    base is the class from ``gcsfs.core``: the one that gcsfs exports asks the endpoint about each
    bucket's layout over gRPC first, which takes minutes where only HTTP is spoken.
    """

    @staticmethod
    def close_session(loop: Any, session: Any, asynchronous: bool = False) -> None:
        if session.closed or loop is not fsspec.asyn.loop[0]:
            return
        closing = asyncio.run_coroutine_threadsafe(session.close(), loop)
        if asyncio._get_running_loop() is not loop:
            with suppress(TimeoutError):
                closing.result(1)


def open_session(options: Mapping[str, Any]) -> tuple[Any, float]:
    """Open a gcsfs file system; return it and the seconds that one request may take.

    Parameters
    ----------
    options : mapping
        gcsfs's own, as `check_options` lets them pass.
    """
    used = {name: value for name, value in options.items() if name in _USED}
    used["token"] = _token(options.get("token"))
    try:
        file_system = _FileSystem(skip_instance_cache=True, use_listings_cache=False, **used)
    except (OSError, LookupError, TypeError, ValueError) as error:
        # The text is not repeated: it may quote a key.
        raise InvalidOptionError(
            f"the storage options 'token' and 'project' do not work ({type(error).__name__}); "
            "'token' is a file of credentials, a dict of them, an access token, or one of "
            f"{sorted(filter(None, _METHODS))}"
        ) from error
    return file_system, _seconds(options.get("requests_timeout"), options.get("timeout"))


def _token(token: Any) -> Any:
    """Take an access token as it is; gcsfs would ask a Google server about it first."""
    if isinstance(token, os.PathLike):
        token = os.fspath(token)
    if not isinstance(token, str) or token in _METHODS or os.path.exists(token):
        return token
    if os.sep in token or token.endswith(".json") or token == "browser":
        raise InvalidOptionError(
            "the storage option 'token' names no existing file; give a file of credentials, an "
            f"access token, a dict, or one of {sorted(filter(None, _METHODS))}"
        )
    return Credentials(token)  # type: ignore[no-untyped-call]  # google-auth has no types here


def _seconds(*limits: Any) -> float:
    """Return the lowest of some timeouts: None, seconds, or aiohttp's ClientTimeout."""
    totals = [
        limit.total if isinstance(limit, aiohttp.ClientTimeout) else limit for limit in limits
    ]
    return min((float(total) for total in totals if total is not None), default=float("inf"))
