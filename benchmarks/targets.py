"""Where to: a directory, servers on loopback, or any place that the user names."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOCAL = "local"
SERVED = ("s3", "gcs", "azure")
"""Targets that need a server; the test suite's are used."""
TARGETS = (LOCAL, *SERVED)

# Left alone, Node.js collects its whole heap again and again while bodies pass, or does not, as it
# happens: that halves what Azurite can do, for whoever is measured then.
_NODE = ("--no-incremental-marking", "--min-semi-space-size=64", "--max-semi-space-size=128")
_SERVERS = {"s3": "SeaweedFS", "gcs": "fake-gcs-server", "azure": "Azurite"}


class TargetUnavailableError(Exception):
    """The target cannot be had here; the message says why."""


@dataclass(frozen=True)
class Target:
    """A place to write to.

    Attributes
    ----------
    name, title : str
        For the results, and for people.
    uri : str
        A prefix that is the run's own.
    storage_options : mapping
    """

    name: str
    title: str
    uri: str
    # Credentials live here: never in a repr or a result.
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def scheme(self) -> str:
        return self.uri.partition("://")[0] if "://" in self.uri else "file"

    @property
    def directory(self) -> Path | None:
        """Where it is, if it is on this machine's disk."""
        return Path(self.uri) if self.scheme == "file" else None

    def below(self, name: str) -> str:
        return f"{self.uri}/{name}"

    def clear(self, name: str) -> None:
        """Delete what is below a name."""
        import ckptio

        with ckptio.open_backend(self.uri, self.storage_options) as backend:
            backend.delete([info.key for info in backend.list(name)])


@contextlib.contextmanager
def local(directory: str | None = None) -> Iterator[Target]:
    """Make a directory, below CKPTIO_BENCH_DIR if that is set."""
    below = directory or os.environ.get("CKPTIO_BENCH_DIR")
    with tempfile.TemporaryDirectory(prefix="ckptio-bench-", dir=below) as made:
        yield Target(LOCAL, "local disk", made)


@contextlib.contextmanager
def served(name: str) -> Iterator[Target]:
    """Run the server of a store."""
    tests = str(Path(__file__).parents[1] / "tests")
    if tests not in sys.path:
        sys.path.insert(0, tests)
    from servers.process import ServerUnavailableError

    title = f"{name} ({_SERVERS[name]} on loopback)"
    with contextlib.ExitStack() as stack:
        try:
            uri, options = _started(name, stack)
        except (ServerUnavailableError, ImportError) as error:
            raise TargetUnavailableError(f"{title}: {error}") from error
        yield Target(name, title, f"{uri}/bench", options)


def _started(name: str, stack: contextlib.ExitStack) -> tuple[str, Mapping[str, Any]]:
    if name == "s3":
        from servers.seaweedfs import seaweedfs

        s3 = stack.enter_context(seaweedfs())
        return s3.uri, s3.storage_options()
    if name == "gcs":
        from servers.fakegcs import fake_gcs

        gcs = stack.enter_context(fake_gcs())
        # Beside the tests' proxy for preconditions, which would be what is measured.
        return gcs.uri, gcs.storage_options(gcs.bare)
    from servers.azurite import azurite

    azure = stack.enter_context(azurite(_NODE))
    return azure.uri, azure.storage_options()


@contextlib.contextmanager
def given(uri: str, storage_options: Mapping[str, Any]) -> Iterator[Target]:
    """Use a prefix of the user's, below a name that is the run's own."""
    place = f"{uri.rstrip('/')}/ckptio-bench-{secrets.token_hex(6)}"
    scheme = uri.partition("://")[0] if "://" in uri else "local"
    yield Target(scheme, f"{scheme} (as given)", place, storage_options)


@contextlib.contextmanager
def opened(name: str) -> Iterator[Target]:
    """Open a target by its name."""
    with local() if name == LOCAL else served(name) as target:
        yield target
