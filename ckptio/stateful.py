"""Objects with a state of their own as leaves: data iterators, samplers, PyTorch's stateful kind.

A leaf with `state_dict` and `load_state_dict`, or with `get_state` and `set_state`, is saved as
what it returns, a subtree in its place, and restored in place: the object in the target is given
back its state. A type that is registered as a pytree node is no leaf, and taken apart as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ckptio import tree
from ckptio.errors import MismatchError
from ckptio.tree import Pattern, Structure

if TYPE_CHECKING:
    from ckptio.checkpoint import Checkpoint

__all__ = ["captured", "is_stateful", "restore_in_place"]

_CONVENTIONS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
_MISSING = object()


def _convention(leaf: object) -> tuple[str, str] | None:
    # Looked up on the type: a proxy that answers to every name is not meant.
    for names in _CONVENTIONS:
        if all(callable(getattr(type(leaf), name, None)) for name in names):
            return names
    return None


def is_stateful(leaf: object) -> bool:
    """Whether a leaf is saved through methods of its own."""
    return not isinstance(leaf, type) and _convention(leaf) is not None


def captured(pytree: Any) -> Any:
    """Return the tree with the state of each stateful leaf in the leaf's place.

    A tree without any is returned as it is.
    """
    if "jax" not in sys.modules and not any(
        is_stateful(leaf) for _, leaf in tree.flatten(pytree)[1]
    ):
        return pytree  # a tree of NumPy's needs no JAX
    import jax

    leaves, treedef = jax.tree_util.tree_flatten(pytree)
    if not any(map(is_stateful, leaves)):
        return pytree
    return jax.tree_util.tree_unflatten(treedef, [_state(leaf) for leaf in leaves])


def _state(leaf: Any) -> Any:
    names = _convention(leaf)
    return leaf if names is None else getattr(leaf, names[0])()


def restore_in_place(
    read: Callable[[Any], Any],
    open_checkpoint: Callable[[], Checkpoint],
    like: Any,
    only: str | Iterable[str] | None = None,
) -> Any:
    """Restore into a target whose stateful leaves are given their states.

    They are given them after everything was read, so that a restore that fails changes nothing.

    Parameters
    ----------
    read : callable
        Restores a target without stateful leaves.
    open_checkpoint : callable
        Is called if there are stateful leaves, for their states come back as they were saved.
    like : pytree
        The target; None for a tree as saved.
    only : str or iterable of str, optional
        As for `ckptio.restore`. A stateful leaf that it does not match is left alone.

    Raises
    ------
    MismatchError
        If `only` matches a part of a stateful leaf's state.
    """
    import jax

    treedef: Any  # its stubs lack methods
    leaves, treedef = jax.tree_util.tree_flatten(like)
    if not any(map(is_stateful, leaves)):
        return read(like)
    # As ckptio.tree names them; None is no leaf for either.
    named = [(path, leaf) for path, leaf in tree.flatten(like)[1]]
    chosen: dict[int, Any] = {}
    with open_checkpoint() as checkpoint:
        for number, (path, leaf) in enumerate(named):
            if is_stateful(leaf):
                saved = _saved_state(checkpoint, path, only)
                if saved is not _MISSING:
                    chosen[number] = saved
        target = [chosen.get(number, leaf) for number, leaf in enumerate(leaves)]
        restored = read(jax.tree_util.tree_unflatten(treedef, target))
    found = treedef.flatten_up_to(restored)
    for number in chosen:
        names = _convention(leaves[number])
        assert names is not None
        getattr(leaves[number], names[1])(found[number])
        found[number] = leaves[number]
    return jax.tree_util.tree_unflatten(treedef, found)


def _saved_state(checkpoint: Checkpoint, path: str, only: str | Iterable[str] | None) -> Any:
    """Return what the checkpoint has at a path, as a target; or _MISSING, if it is not wanted."""
    node = subtree(checkpoint.manifest.structure, path.split("/") if path else [])
    if node is _MISSING:
        return _MISSING
    if only is not None:
        pattern = Pattern(only)
        entries = checkpoint.manifest.leaves
        paths = [entries[number].path for number in tree.leaf_numbers(node)] or [path]
        matched = [name for name in paths if pattern.matches(name)]
        if not matched:
            return _MISSING
        if len(matched) < len(paths):
            raise MismatchError(
                f"only={only!r} matches {matched[0]!r}, a part of the state of the object at "
                f"{path!r}: match all of it with '{path}/**', or nothing",
                matched,
            )
    return tree.unflatten(node, [*checkpoint.leaves.values()])


def subtree(structure: Structure, path: Iterable[str]) -> Any:
    """Return the node of a structure at a path; _MISSING if there is none."""
    node = structure
    for step in path:
        match node:
            case {"dict": dict() as children}:
                named = {tree.segment(key): child for key, child in children.items()}
            case {"items": list() as pairs}:
                named = {tree.segment(key): child for key, child in pairs}
            case {"tuple": list() as nodes} | {"children": list() as nodes}:
                named = {str(i): child for i, child in enumerate(nodes)}
            case list() as nodes:
                named = {str(i): child for i, child in enumerate(nodes)}
            case _:
                return _MISSING
        if step not in named:
            return _MISSING
        node = named[step]
    return node
