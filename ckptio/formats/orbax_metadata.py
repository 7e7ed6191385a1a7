"""What an Orbax checkpoint says of itself: its tree, its leaves, how they were sharded.

Read from ``_METADATA`` (the tree, in JSON), ``_sharding``, ``_strings.json`` and
``array_metadatas/process_*``; everything is checked before it is used. Written after what Orbax
0.11 and 0.12 write: https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ckptio import tree
from ckptio.arrays import ShardingInfo
from ckptio.backend import Backend, check_key
from ckptio.errors import InvalidKeyError, ManifestError, NotFoundError

__all__ = ["Item", "Node", "read_item"]

MAX_METADATA = 1 << 30
"""Bytes of the longest metadata file that is read."""

_SEQUENCE, _DICT = 1, 2
_EMPTY: Mapping[str, tree.Structure] = {
    "Dict": {"dict": {}},
    "List": [],
    "Tuple": {"tuple": []},
    "None": None,
    "NamedTuple": None,
}


@dataclass(frozen=True)
class Node:
    """One leaf: its keys, the name of its array, and what kind of value it was."""

    keys: tuple[str | int, ...]
    name: str
    type: str
    sharding: ShardingInfo | None = None
    implementation: str | None = None
    text: str | None = None


@dataclass(frozen=True)
class Item:
    """One pytree of a checkpoint.

    Attributes
    ----------
    prefix : str
        Of its keys: empty, or the name of the item and a slash.
    ocdbt, zarr3 : bool
        How its arrays are stored.
    complete : bool
        Whether every chunk was written, be it full of the fill value.
    nodes : tuple of Node
        Its leaves.
    empty : tuple of (keys, structure)
        Containers without leaves, and Nones.
    metadata : mapping
        The user's own.
    """

    prefix: str
    ocdbt: bool
    zarr3: bool
    complete: bool
    nodes: tuple[Node, ...]
    empty: tuple[tuple[tuple[str | int, ...], tree.Structure], ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def structure(self, first: int) -> tree.Structure:
        """Return the tree, with its leaves numbered from `first`.

        Raises
        ------
        ValueError
            If the leaves do not make up one tree.
        """
        root: Any = _Container()
        found = [(node.keys, first + i) for i, node in enumerate(self.nodes)]
        for keys, value in [*found, *self.empty]:
            if not keys:
                if len(found) + len(self.empty) != 1:
                    raise ValueError("the root is a leaf, and there are others")
                return value
            node = root
            for key in keys[:-1]:
                node = node.children.setdefault(key, _Container())
                if not isinstance(node, _Container):
                    raise ValueError(f"{key!r} is a leaf and a container")
            if keys[-1] in node.children:
                raise ValueError(f"two leaves have the keys {keys!r}")
            node.children[keys[-1]] = value
        return root.structure()


class _Container:
    def __init__(self) -> None:
        self.children: dict[str | int, Any] = {}

    def structure(self) -> tree.Structure:
        nodes = {
            key: child.structure() if isinstance(child, _Container) else child
            for key, child in self.children.items()
        }
        if nodes and all(isinstance(key, int) for key in nodes):
            if {*nodes} != {*range(len(nodes))}:
                raise ValueError("a list has gaps")
            return [nodes[i] for i in range(len(nodes))]
        if any(isinstance(key, int) for key in nodes):
            raise ValueError("a container has keys and positions")
        return {"dict": nodes}


def read_item(store: Backend, prefix: str, names: Sequence[str]) -> Item:
    """Read the metadata of one item.

    Parameters
    ----------
    names : sequence of str
        What lies directly below the prefix.

    Raises
    ------
    ManifestError
        If it is malformed.
    """
    key = f"{prefix}_METADATA"
    document = load_json(store, key)
    try:
        entries = document.get("tree_metadata")
        if not isinstance(entries, dict):
            raise ValueError("it has no tree_metadata")
        shardings = _shardings(store, prefix) if "_sharding" in names else {}
        strings = load_json(store, f"{prefix}_strings.json") if "_strings.json" in names else {}
        generators = _generators(store, prefix) if "array_metadatas/" in names else {}
        nodes, empty = [], []
        for keys, value in _entries(entries):
            kind = value.get("value_type")
            if (
                isinstance(kind, str)
                and kind in _EMPTY
                and (value.get("skip_deserialize") or kind == "None")
            ):
                empty.append((keys, _EMPTY[kind]))
                continue
            name = ".".join(map(str, keys))
            if kind == "string":
                text = strings.get(name)
                if not isinstance(text, str):
                    raise ValueError(f"the string {name!r} is not in _strings.json")
                nodes.append(Node(keys, name, "string", text=text))
                continue
            check_key(name)
            nodes.append(Node(keys, name, str(kind), shardings.get(name), generators.get(name)))
    except (ValueError, TypeError, KeyError, RecursionError, InvalidKeyError) as error:
        raise ManifestError(f"{store.describe(key)} is not valid: {error}") from error
    metadata = document.get("custom_metadata")
    return Item(
        prefix,
        "manifest.ocdbt" in names,
        document.get("use_zarr3") is True,
        document.get("store_array_data_equal_to_fill_value") is True,
        tuple(sorted(nodes, key=lambda node: [(str(type(k)), k) for k in node.keys])),
        tuple(empty),
        metadata if isinstance(metadata, dict) else {},
    )


def load_json(store: Backend, key: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises
    ------
    ManifestError
        If it is none.
    """
    where = store.describe(key)
    if (size := store.head(key).size) > MAX_METADATA:
        raise ManifestError(f"{where} is {size} bytes long")
    try:
        document = json.loads(store.read(key).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{where} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ManifestError(f"{where} is not a JSON object")
    return document


def _entries(
    entries: Mapping[str, Any],
) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    for entry in entries.values():
        keys: list[str | int] = []
        for step in entry["key_metadata"]:
            key, kind = step["key"], step["key_type"]
            if not isinstance(key, str) or kind not in (_SEQUENCE, _DICT):
                raise ValueError(f"a key is {step!r}")
            key.encode()
            keys.append(int(key) if kind == _SEQUENCE else key)
        if len(keys) > tree.MAX_DEPTH:
            raise ValueError(f"the tree is nested deeper than {tree.MAX_DEPTH} levels")
        value = entry["value_metadata"]
        if not isinstance(value, dict):
            raise ValueError(f"the value of {keys!r} is described by {value!r}")
        yield tuple(keys), value


def _shardings(store: Backend, prefix: str) -> dict[str, ShardingInfo]:
    """Return how arrays were sharded, for information; what is not understood is left out."""
    found = {}
    for encoded, text in load_json(store, f"{prefix}_sharding").items():
        try:
            name = base64.b64decode(encoded).decode()
            said = json.loads(text)
            mesh = dict(zip(said["axis_names"], map(int, said["shape"]), strict=True))
            spec = tuple(
                () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
                for axes in said["partition_spec"]
            )
        except (binascii.Error, ValueError, KeyError, TypeError):
            continue
        if any(n > 1 for n in mesh.values()) and all(isinstance(a, str) for s in spec for a in s):
            found[name] = ShardingInfo(mesh, spec)
    return found


def _generators(store: Backend, prefix: str) -> dict[str, str]:
    """Return the generators of typed PRNG keys, by the names of their arrays."""
    found = {}
    for info in store.list(f"{prefix}array_metadatas"):
        for entry in load_json(store, info.key).get("array_metadatas", []):
            said = entry["array_metadata"]
            more = said.get("ext_metadata") or {}
            if isinstance(implementation := more.get("random_key_impl"), str):
                found[str(said["param_name"])] = implementation
    return found


@dataclass(frozen=True)
class Facts:
    """What ``_CHECKPOINT_METADATA`` says: when it was committed, and the user's own."""

    created: datetime
    metadata: Mapping[str, Any]


def read_facts(store: Backend, prefix: str, names: Sequence[str]) -> Facts:
    """Read what is said of the whole checkpoint; older ones say nothing.

    Raises
    ------
    ManifestError
        If it is no JSON object.
    """
    name = "_CHECKPOINT_METADATA"
    document = load_json(store, prefix + name) if name in names else {}
    committed, metadata = document.get("commit_timestamp_nsecs"), document.get("custom_metadata")
    seconds = committed / 1e9 if isinstance(committed, int) else 0
    created = datetime.fromtimestamp(min(max(seconds, 0), 1 << 35), UTC)
    return Facts(created, metadata if isinstance(metadata, dict) else {})


def find_items(
    store: Backend, names: Sequence[str], prefix: str = ""
) -> tuple[list[Item], dict[str, Any]]:
    """Return the pytrees of a checkpoint, and its items of plain JSON.

    The metadata lies at the root, or one level below, where each item has a directory of its own.

    Parameters
    ----------
    names : sequence of str
        What the checkpoint's directory holds.
    prefix : str
        Of the checkpoint's keys: empty, or a directory and a slash.
    """
    if "_METADATA" in names:
        return [read_item(store, prefix, names)], {}
    items, documents = [], {}
    for name in names:
        if not name.endswith("/"):
            continue
        below = [*store.list_children(f"{prefix}{name[:-1]}")]
        if "_METADATA" in below:
            items.append(read_item(store, prefix + name, below))
        elif "metadata" in below:
            try:
                documents[name[:-1]] = load_json(store, f"{prefix}{name}metadata")
            except (ManifestError, NotFoundError):
                continue  # an item of somebody's own
    return items, documents
