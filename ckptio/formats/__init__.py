"""Checkpoints of other programs, seen as ckptio's own: each format gives a `Source`.

`ckptio.open` asks here where it finds no manifest of ckptio's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ckptio import hooks
from ckptio.backend import Backend
from ckptio.errors import InvalidURIError
from ckptio.operation import Operation
from ckptio.retry import RetryingBackend
from ckptio.source import Source

__all__ = ["SUFFIX", "Glance", "glance", "open_file", "parent", "recognise"]

SUFFIX = ".safetensors"

_ORBAX = frozenset(
    # The last three are the items that older versions wrote without a file of their own above.
    ["_METADATA", "_CHECKPOINT_METADATA", "orbax.checkpoint", "default/", "state/", "pytree/"]
)


def open_file(
    uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> Source | None:
    """Open a URI that names one safetensors file; None if there is no such object.

    Raises
    ------
    ManifestError
        If the file is malformed.
    """
    from ckptio.formats import safetensors

    directory, name = parent(uri)
    backend = hooks.open_backend(directory, storage_options)
    try:
        retrying = RetryingBackend(backend, Operation(f"opening {backend.describe(name)}"))
        if not retrying.exists(name):
            backend.close()
            return None
        return Source(
            backend,
            safetensors.manifest_of_file(retrying, name),
            "safetensors",
            backend.describe(name),
            checksums=False,
        )
    except BaseException:
        backend.close()
        raise


def parent(uri: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the URI of the directory that a file lies in, and the file's name.

    Raises
    ------
    InvalidURIError
        If the URI has no directory, or no name.
    """
    text = os.fspath(uri)
    if "://" not in text:
        text = os.path.abspath(os.path.expanduser(text))
    directory, _, name = text.rpartition("/")
    if not name or directory.endswith(("/", ":")):
        raise InvalidURIError(f"{text!r} does not name a file in a directory")
    return directory or "/", name


@dataclass(frozen=True)
class Glance:
    """What a foreign checkpoint's metadata says of it, without its arrays being opened."""

    format: str
    created: datetime
    leaves: int
    metadata: Mapping[str, Any]


def glance(store: Backend, name: str) -> Glance | None:
    """Look at the checkpoint of another program in a directory of a run; None if it holds none.

    Raises
    ------
    ManifestError
        If its metadata is malformed.
    """
    names = [*store.list_children(name)]
    if not {*names} & _ORBAX:
        return None
    from ckptio.formats import orbax_metadata

    facts = orbax_metadata.read_facts(store, f"{name}/", names)
    items, documents = orbax_metadata.find_items(store, names, f"{name}/")
    if not items:
        return None
    leaves = sum(len(item.nodes) for item in items)
    return Glance("orbax", facts.created, leaves, {**facts.metadata, **documents})


def recognise(backend: Backend, store: Backend) -> Source | None:
    """Look for another program's checkpoint at the root of a backend.

    Parameters
    ----------
    backend : Backend
        Becomes the source's.
    store : Backend
        The same, to be asked here (with retries).

    Returns
    -------
    Source or None
        None if nothing is recognised.
    """
    names = [*store.list_children()]
    found = {*names}
    if found & _ORBAX:
        from ckptio.formats import orbax

        if (source := orbax.open_directory(backend, store, names)) is not None:
            return source
    if any(name.endswith((SUFFIX, f"{SUFFIX}.index.json")) for name in found):
        from ckptio.formats import safetensors

        manifest = safetensors.manifest_of_directory(store, names)
        return Source(backend, manifest, "safetensors", backend.uri, checksums=False)
    return None
