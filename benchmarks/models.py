"""The workloads: trees of arrays with the shapes of real models."""

from __future__ import annotations

from typing import Any


def transformer_targets(layers: int = 11, width: int = 2048, hidden: int = 8192) -> dict[str, Any]:
    """Return the abstract tree of a float32 transformer, 5 leaves a layer, 4×2 over 8 devices.

    With the defaults: 55 leaves, 1.9 GB.
    """
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((4, 2), ("data", "model"))
    shapes = {
        "attn_q": ((width, width), P("data", "model")),
        "attn_kv": ((width, width // 4), P("data", "model")),
        "attn_out": ((width, width), P("model", "data")),
        "mlp_in": ((width, hidden), P("data", "model")),
        "mlp_out": ((hidden, width), P("model", "data")),
    }
    return {
        f"layer{i}": {
            name: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
            for name, (shape, spec) in shapes.items()
        }
        for i in range(layers)
    }


def fill(targets: Any) -> Any:
    """Return arrays of random numbers for an abstract tree."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)

    def leaf(target: Any) -> Any:
        # Made shard by shard, so that making the tree leaves no high-water mark of its own.
        def piece(index: tuple[slice, ...]) -> Any:
            lengths = [len(range(*s.indices(n))) for s, n in zip(index, target.shape, strict=True)]
            return rng.standard_normal(lengths, dtype=np.float32)

        return jax.make_array_from_callback(target.shape, target.sharding, piece)

    return jax.block_until_ready(jax.tree.map(leaf, targets))
