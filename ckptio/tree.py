"""Pytrees: taken apart into a structure and named leaves, put together again, and pruned.

A *structure* is plain JSON: an int is the leaf of that number, null is None, an array is a list,
and an object is one of

    {"dict": {name: node, …}}                a dict with string keys
    {"items": [[key, node], …]}              a dict with int keys too
    {"tuple": [node, …]}
    {"custom": type, "items": [[name, node], …]}   a registered node with named children
    {"custom": type, "children": [node, …]}        a registered node without names

Nothing of it is ever executed or imported: custom nodes come back as themselves through a target
that has them, and as a dict or tuple without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckptio.errors import UnsupportedLeafError

__all__ = ["Pattern", "flatten", "leaf_numbers", "prune", "unflatten"]

MAX_DEPTH = 128
"""Deepest nesting that is saved; recursion over what is read stays bounded by it."""

Structure = Any  # plain JSON, as the module's docstring says
Step = str | int

_KEYS = (str, int)
_MISSING = object()
_WILDCARD = re.compile(r"\*|\?|\[(?P<not>!)?(?P<set>[^]/]+)\]|.", re.DOTALL)


def segment(key: object) -> str:
    """Return a key as one segment of a path, ``~`` and ``/`` escaped as in JSON Pointer."""
    return str(key).replace("~", "~0").replace("/", "~1")


def flatten(tree: object) -> tuple[Structure, list[tuple[str, Any]]]:
    """Take a pytree apart.

    Returns
    -------
    structure
        See the module's docstring.
    leaves : list of (path, leaf)
        In JAX's order, paths such as ``params/layers/0/kernel``.

    Raises
    ------
    UnsupportedLeafError
        If a dict has keys other than str and int, two leaves get one path, or the tree is nested
        too deep.
    """
    walk = _Walk()
    structure = walk.flatten(tree, ())
    paths = {path for path, _ in walk.leaves}
    if len(paths) != len(walk.leaves):
        seen: set[str] = set()
        for path, _ in walk.leaves:
            if path in seen:
                raise UnsupportedLeafError(
                    f"two leaves have the path {path!r}: rename one of the keys"
                )
            seen.add(path)
    return structure, walk.leaves


class _Walk:
    """One walk over a tree: the leaves so far, and which types turned out to be leaves."""

    def __init__(self) -> None:
        self.leaves: list[tuple[str, Any]] = []
        self._leaf_types: set[type] = {int, float, complex, bool, str, bytes, np.ndarray}

    def flatten(self, node: Any, at: tuple[str, ...]) -> Structure:
        if len(at) > MAX_DEPTH:
            raise UnsupportedLeafError(
                f"the tree is nested deeper than {MAX_DEPTH} levels at {'/'.join(at[:4])}/…"
            )
        kind = type(node)
        if node is None:
            return None
        if kind is dict:
            for key in node:
                _check_key(key, at)
            items = [
                (key, self.flatten(node[key], (*at, segment(key)))) for key in _sorted(node, at)
            ]
            if all(type(key) is str for key, _ in items):
                return {"dict": dict(items)}
            return {"items": [list(item) for item in items]}
        if kind is list or kind is tuple:
            children = [self.flatten(child, (*at, str(i))) for i, child in enumerate(node)]
            return children if kind is list else {"tuple": children}
        if kind not in self._leaf_types:
            if (parts := _custom_children(node)) is not None:
                return self._custom(f"{kind.__module__}.{kind.__qualname__}", parts, at)
            self._leaf_types.add(kind)
        self.leaves.append(("/".join(at), node))
        return len(self.leaves) - 1

    def _custom(
        self, name: str, parts: Sequence[tuple[Step | None, Any]], at: tuple[str, ...]
    ) -> Structure:
        nodes = [
            self.flatten(child, (*at, segment(i if step is None else step)))
            for i, (step, child) in enumerate(parts)
        ]
        if any(step is None for step, _ in parts):
            return {"custom": name, "children": nodes}
        items = [[step, node] for (step, _), node in zip(parts, nodes, strict=True)]
        return {"custom": name, "items": items}


def _check_key(key: object, at: tuple[str, ...]) -> None:
    if type(key) not in _KEYS or (type(key) is int and not -(2**63) <= key < 2**63):
        raise UnsupportedLeafError(
            f"the dict at {'/'.join(at) or 'the root'!r} has the key {key!r} of type "
            f"{type(key).__name__}: keys are str or (64-bit) int"
        )
    if type(key) is str and not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedLeafError(
                f"the key {key!r} of the dict at {'/'.join(at) or 'the root'!r} is not Unicode"
            ) from error


def _sorted(node: Mapping[Any, Any], at: tuple[str, ...]) -> list[Any]:
    try:
        return sorted(node)
    except TypeError as error:
        raise UnsupportedLeafError(
            f"the keys of the dict at {'/'.join(at) or 'the root'!r} cannot be sorted, which JAX "
            f"needs: {error}"
        ) from error


def _custom_children(node: Any) -> list[tuple[Step | None, Any]] | None:
    """Return the children of a registered pytree node with their names, None for a leaf."""
    from jax import tree_util

    # One level only: everything below the node itself counts as a leaf.
    found, _ = tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(found) == 1 and not found[0][0]:
        return None
    return [(_step(path[0]), child) for path, child in found]


def _step(entry: Any) -> Step | None:
    from jax import tree_util

    if isinstance(entry, tree_util.GetAttrKey):
        return str(entry.name)
    if isinstance(entry, tree_util.DictKey):
        key: Step = entry.key
        return key if type(key) in _KEYS else str(key)
    return None


def unflatten(structure: Structure, leaves: Sequence[Any] | Mapping[int, Any]) -> Any:
    """Put a tree together from its structure and its leaves, by their numbers."""
    if isinstance(structure, int):
        return leaves[structure]
    if structure is None:
        return None
    if isinstance(structure, list):
        return [unflatten(node, leaves) for node in structure]
    if "tuple" in structure or "children" in structure:
        nodes = structure.get("tuple", structure.get("children"))
        return tuple(unflatten(node, leaves) for node in nodes)
    return {key: unflatten(node, leaves) for key, node in _items(structure)}


def _items(structure: Mapping[str, Any]) -> Iterable[tuple[Any, Structure]]:
    if "dict" in structure:
        return structure["dict"].items()  # type: ignore[no-any-return]
    return [(key, node) for key, node in structure["items"]]


def leaf_numbers(structure: Structure, depth: int = 0) -> Iterator[int]:
    """Yield the leaf numbers of a structure that came from storage.

    Raises
    ------
    ValueError
        If it is not a structure, or nested too deep.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"the tree is nested deeper than {MAX_DEPTH} levels")
    match structure:
        case bool():
            raise ValueError(f"not a tree node: {structure!r}")
        case None:
            return
        case int():
            yield structure
            return
        case list() as children:
            pass
        case {"dict": dict() as found}:
            children = list(found.values())
        case {"tuple": list() as children} | {"children": list() as children}:
            pass
        case {"items": list() as pairs}:
            if not all(isinstance(p, list) and len(p) == 2 and type(p[0]) in _KEYS for p in pairs):
                raise ValueError("a dict in the tree has malformed items")
            children = [pair[1] for pair in pairs]
        case _:
            raise ValueError(f"not a tree node: {str(structure)[:80]}")
    for child in children:
        yield from leaf_numbers(child, depth + 1)


def prune(structure: Structure, keep: Sequence[bool], pattern: Pattern) -> Structure | None:
    """Return the structure with only the leaves to keep.

    Containers that lose everything go; lists and tuples keep their length, with None where
    something went, so that positions still say which layer is which. Nones and empty containers
    stay where the pattern matches their path.
    """
    found = _prune(structure, keep, pattern, ())
    return None if found is _MISSING else found


def _prune(node: Structure, keep: Sequence[bool], pattern: Pattern, at: tuple[str, ...]) -> Any:
    if isinstance(node, int):
        return node if keep[node] else _MISSING
    if node is None:
        return None if pattern.matches("/".join(at)) else _MISSING
    sequence = node if isinstance(node, list) else node.get("tuple", node.get("children"))
    steps = range(len(sequence)) if sequence is not None else [key for key, _ in _items(node)]
    nodes = sequence if sequence is not None else [child for _, child in _items(node)]
    kept = [
        (step, _prune(child, keep, pattern, (*at, segment(step))))
        for step, child in zip(steps, nodes, strict=True)
    ]
    if all(child is _MISSING for _, child in kept):
        return node if not kept and pattern.matches("/".join(at)) else _MISSING
    if sequence is None:
        return {"items": [[step, child] for step, child in kept if child is not _MISSING]}
    filled = [None if child is _MISSING else child for _, child in kept]
    return filled if isinstance(node, list) else {"tuple": filled}


class Pattern:
    """Globs over leaf paths; a path matches if any of them does.

    ``*``, ``?`` and ``[…]`` stay within a segment, ``**`` stands for any number of segments,
    none included. A path written out matches itself, whatever characters it has.

    Examples
    --------
    >>> Pattern("params/**").matches("params/layers/0/kernel")
    True
    >>> Pattern(["*/bias", "step"]).matches("params/0/bias")
    False
    """

    def __init__(self, globs: str | Iterable[str]) -> None:
        self.globs = (globs,) if isinstance(globs, str) else tuple(globs)
        self._literal = frozenset(self.globs)
        self._regex = re.compile("|".join(map(_translate, self.globs)) or r"(?!)", re.DOTALL)

    def matches(self, path: str) -> bool:
        """Whether the path is one that is meant."""
        return path in self._literal or self._regex.fullmatch(f"/{path}") is not None

    def unmatched(self, paths: Sequence[str]) -> list[str]:
        """Return the globs that match none of these paths."""
        return [glob for glob in self.globs if not any(map(Pattern(glob).matches, paths))]


def _translate(glob: str) -> str:
    # Every segment brings the slash in front of it, so that "**" may stand for nothing at all.
    return "".join(
        r"(?:/[^/]*)*" if part == "**" else "/" + _WILDCARD.sub(_wildcard, part)
        for part in glob.split("/")
    )


def _wildcard(match: re.Match[str]) -> str:
    text = match[0]
    if text == "*":
        return "[^/]*"
    if text == "?":
        return "[^/]"
    if match["set"]:
        chars = re.escape(match["set"]).replace(r"\-", "-")
        return f"[{'^' if match['not'] else ''}{chars}]"
    return re.escape(text)
