"""A workload's tree in the kind that a peer takes; and whether a restored one is bit for bit it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.workloads import AXES, MESH, Leaf, Workload, nested


class Trees(Protocol):
    """One kind of tree."""

    def make(self, leaves: tuple[Leaf, ...]) -> Any:
        """Return the tree that is saved."""

    def like(self, workload: Workload) -> Any:
        """Return what a restore is told to return."""

    def ready(self, tree: Any) -> Any:
        """Wait until a restored tree is there."""

    def arrays(self, tree: Any, leaf: Leaf) -> npt.NDArray[Any]:
        """Return one leaf of a restored tree."""


class JaxTrees:
    """Nested dictionaries of `jax.Array`, 4×2 over 8 devices."""

    def make(self, leaves: tuple[Leaf, ...]) -> Any:
        jax = _jax()

        # Made shard by shard from the leaf, so that one leaf at a time is there twice.
        def array(leaf: Leaf) -> Any:
            content = leaf.content()
            return jax.make_array_from_callback(
                leaf.shape, _sharding(leaf, other=False), lambda index: content[index].copy()
            )

        return jax.block_until_ready(nested({leaf.path: array(leaf) for leaf in leaves}))

    def like(self, workload: Workload) -> Any:
        jax = _jax()
        return nested(
            {
                leaf.path: jax.ShapeDtypeStruct(
                    leaf.shape, np.float32, sharding=_sharding(leaf, other=workload.other_mesh)
                )
                for leaf in workload.target
            }
        )

    def ready(self, tree: Any) -> Any:
        return _jax().block_until_ready(tree)

    def arrays(self, tree: Any, leaf: Leaf) -> npt.NDArray[Any]:
        for segment in leaf.path.split("/"):
            tree = tree[segment]
        if len(tree.sharding.device_set) != MESH[0] * MESH[1]:
            raise AssertionError(f"{leaf.path} is on {len(tree.sharding.device_set)} devices")
        return np.asarray(tree)


def _jax() -> Any:
    import jax  # only where there is one: the environment of another kind has none

    return jax


def _sharding(leaf: Leaf, *, other: bool) -> Any:
    jax = _jax()
    shape, spec = (MESH[::-1], leaf.spec[::-1]) if other else (MESH, leaf.spec)
    return jax.sharding.NamedSharding(jax.make_mesh(shape, AXES), jax.sharding.PartitionSpec(*spec))


class TorchTrees:
    """Flat dictionaries of tensors."""

    def make(self, leaves: tuple[Leaf, ...]) -> Any:
        import torch

        return {leaf.path: torch.from_numpy(leaf.content()) for leaf in leaves}

    def like(self, workload: Workload) -> Any:
        import torch

        return {
            leaf.path: torch.empty(leaf.shape, dtype=torch.float32, device="meta")
            for leaf in workload.target
        }

    def ready(self, tree: Any) -> Any:
        return tree

    def arrays(self, tree: Any, leaf: Leaf) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = tree[leaf.path].numpy()
        return found


KINDS: dict[str, Trees] = {"jax": JaxTrees(), "torch": TorchTrees()}


def check(trees: Trees, tree: Any, leaves: tuple[Leaf, ...]) -> None:
    """Raise unless every leaf is bit for bit what was saved."""
    for leaf in leaves:
        same(trees.arrays(tree, leaf), leaf.content(), leaf.path)


def same(found: npt.NDArray[Any], expected: npt.NDArray[Any], what: str) -> None:
    """Raise unless two arrays are the same bits."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise AssertionError(f"{what} came back as {found.dtype}{found.shape}")
    bits = np.ascontiguousarray(found).view(np.uint32)
    if not np.array_equal(bits, np.ascontiguousarray(expected).view(np.uint32)):
        raise AssertionError(f"{what} came back with other bits")
