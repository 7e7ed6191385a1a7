"""Orbax checkpoints: every layout that TensorStore reads, seen as a `Manifest`.

With and without OCDBT, zarr and zarr3, the pytree at the root or one level below it (a
`CheckpointManager`'s step, Orbax's v1 API). Leaves are what Orbax itself restores without a target:
tuples are lists, NumPy scalars are Python's. A checkpoint with one pytree is that pytree; with
several, a dict of them; items of plain JSON become metadata.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import numpy as np

from ckptio import dtypes, tree
from ckptio.backend import Backend
from ckptio.errors import DriverUnavailableError, ManifestError, UnsupportedFormatError
from ckptio.formats import orbax_metadata
from ckptio.formats.bridge import Bridge
from ckptio.formats.orbax_metadata import Facts, Item, Node
from ckptio.formats.orbax_reader import OrbaxReader, Stored
from ckptio.manifest import ChunkTable, LeafEntry, Manifest
from ckptio.options import RestoreOptions
from ckptio.source import Source

__all__ = ["open_directory"]

CACHE = 64 << 20
"""Bytes of decoded chunks that TensorStore keeps, for boxes that share some."""

_SCALARS = {"b": "bool", "i": "int", "u": "int", "f": "float", "V": "float", "c": "complex"}


def open_directory(backend: Backend, store: Backend, names: Sequence[str]) -> Source | None:
    """Open the Orbax checkpoint at a backend's root; None if it turns out to be none.

    Raises
    ------
    DriverUnavailableError
        If TensorStore is not installed.
    ManifestError
        If its metadata is malformed.
    UnsupportedFormatError
        If there is no pytree with metadata in it.
    """
    if backend.uri.rstrip("/").rpartition("/")[2].find(".orbax-checkpoint-tmp") >= 0:
        raise UnsupportedFormatError(f"{backend.uri} is an Orbax checkpoint that was not finished")
    items, documents = orbax_metadata.find_items(store, names)
    if not items:
        if not {"_CHECKPOINT_METADATA", "orbax.checkpoint", "_METADATA"} & {*names}:
            return None
        raise UnsupportedFormatError(
            f"{backend.uri} is an Orbax checkpoint without a pytree that has _METADATA: it holds "
            "other items, or was written before Orbax 0.4 (restore it with Orbax, and save again)"
        )
    facts = orbax_metadata.read_facts(store, "", names)
    release, kvstore = _access(backend, store)
    try:
        stored = _open_all(items, kvstore, store.uri)
        manifest = _manifest(items, stored, documents, facts, store)
    except BaseException:
        release()
        raise

    def reader(
        backend: Backend,
        manifest: Manifest,
        options: RestoreOptions,
        *,
        verify: bool = True,
        count: Callable[[int], None] = lambda _: None,
    ) -> OrbaxReader:
        del verify  # there is nothing to verify with
        return OrbaxReader(backend.uri, manifest, stored, options, count, release.failure)

    return Source(
        backend,
        manifest,
        "orbax",
        backend.uri,
        checksums=False,
        reader=reader,
        release=release,
    )


class _Release:
    """Stops a bridge, if there is one; also when nobody asked for it."""

    def __init__(self, bridge: Bridge | None) -> None:
        self._bridge = bridge
        self._finalizer = weakref.finalize(self, bridge.close) if bridge is not None else None

    def failure(self) -> Exception | None:
        """Return what went wrong in the store, where TensorStore could not be told."""
        return self._bridge.failure if self._bridge is not None else None

    def __call__(self) -> None:
        if self._finalizer is not None:
            self._finalizer()


def _access(backend: Backend, store: Backend) -> tuple[_Release, Callable[[str], dict[str, Any]]]:
    """Return what to release, and the specification of the key-value store below a prefix."""
    uri = backend.uri
    if "://" not in uri or uri.startswith("file:///"):
        root = unquote(uri.removeprefix("file://")) if "://" in uri else uri

        return _Release(None), lambda prefix: {"driver": "file", "path": f"{root}/{prefix}"}
    bridge = Bridge(store)
    return _Release(bridge), lambda prefix: {
        "driver": "http",
        "base_url": bridge.url,
        "path": f"{bridge.root}{prefix}",
    }


def _open_all(
    items: Sequence[Item], kvstore: Callable[[str], dict[str, Any]], where: str
) -> list[Stored]:
    """Open every leaf's array: metadata only, all at once."""
    try:
        import tensorstore
    except ImportError as error:
        raise DriverUnavailableError(
            f"{where} is an Orbax checkpoint, which is read with TensorStore: "
            "pip install 'ckptio[orbax]'"
        ) from error
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE}})
    pending: list[tuple[Node, Any]] = []
    for item in items:
        base = kvstore(item.prefix)
        for node in item.nodes:
            if node.text is not None:
                pending.append((node, None))
                continue
            spec: dict[str, Any] = {
                "driver": "zarr3" if item.zarr3 else "zarr",
                "kvstore": {"driver": "ocdbt", "base": base, "path": f"{node.name}/"}
                if item.ocdbt
                else {**base, "path": f"{base['path']}{node.name}/"},
                # A chunk that is lost must not come back as zeros.
                "fill_missing_data_reads": not item.complete,
                # What was read once does not change.
                "recheck_cached_metadata": False,
                "recheck_cached_data": False,
            }
            pending.append((node, tensorstore.open(spec, read=True, open=True, context=context)))
    found = []
    for node, future in pending:
        if future is None:
            text = np.frombuffer((node.text or "").encode("utf-8"), np.uint8)
            found.append(Stored(node.name, text))
            continue
        try:
            found.append(Stored(node.name, future.result()))
        except Exception as error:  # TensorStore raises ValueError, OSError and others
            raise ManifestError(
                f"the array {node.name!r} of {where} cannot be opened: {error}"
            ) from error
    return found


def _manifest(
    items: Sequence[Item],
    stored: Sequence[Stored],
    documents: Mapping[str, Any],
    facts: Facts,
    store: Backend,
) -> Manifest:
    leaves: list[LeafEntry] = []
    structures: dict[str, tree.Structure] = {}
    single = len(items) == 1
    for item in items:
        name = item.prefix.rstrip("/")
        try:
            structures[name] = item.structure(len(leaves))
        except ValueError as error:
            where = store.describe(f"{item.prefix}_METADATA")
            raise ManifestError(f"{where} is not valid: {error}") from error
        above = [] if single else [name]
        for node in item.nodes:
            path = "/".join(map(tree.segment, [*above, *node.keys]))
            leaves.append(_entry(path, node, stored[len(leaves)]))
    if len({leaf.path for leaf in leaves}) != len(leaves):
        raise ManifestError(f"two leaves of {store.uri} have the same path")
    metadata: dict[str, Any] = {}
    for item in items:
        metadata |= item.metadata
    return Manifest(
        attempt="",
        created=facts.created,
        metadata={**metadata, **facts.metadata, **documents},
        structure=next(iter(structures.values())) if single else {"dict": structures},
        leaves=tuple(leaves),
        objects=(),
        chunks=ChunkTable.build([len(leaf.shape) for leaf in leaves], [[] for _ in leaves]),
        checksums=(),
    )


def _entry(path: str, node: Node, stored: Stored) -> LeafEntry:
    if node.text is not None:
        return LeafEntry(path, "str", "uint8", stored.shape)
    try:
        dtype = dtypes.stored(stored.dtype)
    except TypeError as error:
        raise UnsupportedFormatError(f"the array {node.name!r}: {error}") from error
    kind = "jax" if node.type in ("jax.Array", "jax.random.key") else "numpy"
    if node.implementation is not None:
        kind = "key"
    elif node.type == "scalar" and not stored.shape:
        kind = _SCALARS.get(stored.dtype.kind, "numpy")
    return LeafEntry(path, kind, dtype.name, stored.shape, node.sharding, node.implementation)
