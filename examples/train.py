"""Train a small transformer that can be killed at any moment, and goes on as if nothing had been.

    python examples/train.py URI [--steps 200] [--every 10]

It learns to continue this repository's own Markdown, byte by byte, on eight virtual devices. Run it
again with the same URI after it ended, in whatever way (Ctrl-C, SIGTERM, SIGKILL), and it resumes
after the newest step that was committed: the loss of each step, and the parameters at the end, are
those of an unbroken run, bit for bit. Needs ``pip install ckptio optax``.
"""

from __future__ import annotations

import os

# Eight virtual devices, as on a host with eight accelerators: JAX reads this when it is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xxhash
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckptio import every, keep
from ckptio.errors import CkptioError
from ckptio.manager import CheckpointManager

CONTEXT, BATCH, HEADS = 64, 16, 4
DROPOUT = 0.1
BARS = "▁▂▃▄▅▆▇█"


def main() -> None:
    arguments = parse()
    try:
        train(arguments)
    except CkptioError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("uri", help="of the run: a path, s3://…, gs://…, az://…")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps from one save to the next")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--text", default=str(Path(__file__).parents[1]), help="folder of *.md")
    parser.add_argument("--storage-options", type=json.loads, help="for the driver, in JSON")
    return parser.parse_args()


def train(arguments: argparse.Namespace) -> None:
    """Do the steps that are left, saving as they go."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, 1000)),
    )
    arrays = start(arguments.width, arguments.layers, optimizer)
    update = make_update(optimizer, arrays)
    batches, curve = Batches(arguments.text), Curve()
    # Everything that the next step depends on is one checkpoint.
    state = {"arrays": arrays, "batches": batches, "curve": curve}
    with CheckpointManager(
        arguments.uri,
        keep=keep.latest(3) | keep.best(1, "loss"),
        every=every.steps(arguments.every) | every.steps([arguments.steps]),
        preemption=True,  # on SIGTERM: save and leave
        storage_options=arguments.storage_options,
    ) as manager:
        state, done = manager.restore_latest(like=state, default=(state, 0))
        print(f"resumed after step {done}" if done else "started", flush=True)
        for step in range(done + 1, arguments.steps + 1):
            state["arrays"], loss = update(state["arrays"], batches.next())
            curve.losses.append(float(loss))
            print(f"step {step:>5}  loss {curve.losses[-1]:.4f}", flush=True)
            manager.save(step, state, metrics={"loss": loss})
    report(curve, state["arrays"]["params"])


def report(curve: Curve, params: Any) -> None:
    """Print the whole curve, whichever process computed which part of it, and a fingerprint."""
    losses = np.asarray(curve.losses)
    parts = [part.mean() for part in np.array_split(losses, min(64, losses.size))]
    low, high = min(parts), max(parts)
    marks = [round((part - low) / max(high - low, 1e-9) * (len(BARS) - 1)) for part in parts]
    print("".join(BARS[mark] for mark in marks))
    print(f"{losses.size} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    digest = xxhash.xxh3_64()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    digest.update(losses.tobytes())
    print(f"fingerprint of parameters and losses: {digest.hexdigest()}")


class Batches:
    """A data iterator: random windows of the text. Its state is that of its generator."""

    def __init__(self, folder: str) -> None:
        text = b"\n".join(path.read_bytes() for path in sorted(Path(folder).glob("*.md")))
        if len(text) <= CONTEXT:
            sys.exit(f"there is no Markdown to learn from in {folder}")
        self._text = np.frombuffer(text, np.uint8)
        self._random = np.random.default_rng(0)

    def next(self) -> np.ndarray[Any, Any]:
        """Return bytes of shape (BATCH, CONTEXT + 1)."""
        starts = self._random.integers(self._text.size - CONTEXT, size=BATCH)
        return self._text[starts[:, None] + np.arange(CONTEXT + 1)]

    def get_state(self) -> Mapping[str, Any]:
        """Return what the next batches depend on."""
        return self._random.bit_generator.state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._random.bit_generator.state = state


class Curve:
    """The losses of all steps so far."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the curve so far."""
        return {"losses": np.asarray(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.losses = state["losses"].tolist()


def start(width: int, layers: int, optimizer: optax.GradientTransformation) -> Any:
    """Return parameters, optimizer state and PRNG key, sharded over a 4×2 mesh."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    def make() -> Any:
        keys = iter(jax.random.split(jax.random.key(0), 2 + 4 * layers))

        def kernel(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

        params = {
            "tokens": kernel(256, width),
            "positions": kernel(CONTEXT, width),
            "layers": [
                {
                    "qkv": kernel(width, 3 * width),
                    "out": kernel(width, width),
                    "up": kernel(width, 4 * width),
                    "down": kernel(4 * width, width),
                    "scales": jnp.ones((2, width)),
                }
                for _ in range(layers)
            ],
        }
        return {"params": params, "opt": optimizer.init(params), "key": jax.random.key(1)}

    def sharding(leaf: Any) -> NamedSharding:
        split = leaf.ndim == 2 and leaf.shape[-1] % 2 == 0
        return NamedSharding(mesh, PartitionSpec(None, "model") if split else PartitionSpec())

    shardings = jax.tree.map(sharding, jax.eval_shape(make))
    return jax.jit(make, out_shardings=shardings)()


def make_update(optimizer: optax.GradientTransformation, arrays: Any) -> Callable[..., Any]:
    """Return the compiled step: (arrays, batch) -> (arrays, loss). It donates what it is given."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, arrays)
    mesh = shardings["key"].mesh

    def update(arrays: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        key, now = jax.random.split(arrays["key"])
        loss, gradients = jax.value_and_grad(loss_of)(arrays["params"], batch, now)
        updates, opt = optimizer.update(gradients, arrays["opt"], arrays["params"])
        params = optax.apply_updates(arrays["params"], updates)
        return {"params": params, "opt": opt, "key": key}, loss

    # The same shardings out as in: one compiled program for every step, resumed or not.
    return jax.jit(
        update,
        donate_argnums=0,
        in_shardings=(shardings, NamedSharding(mesh, PartitionSpec("data"))),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
    )


def loss_of(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of each next byte, in nats."""
    batch = batch.astype(jnp.int32)
    x = params["tokens"][batch[:, :-1]] + params["positions"]
    for layer in params["layers"]:
        key, first, second = jax.random.split(key, 3)
        x += dropout(attention(layer, normal(x, layer["scales"][0])), first)
        hidden = jax.nn.gelu(normal(x, layer["scales"][1]) @ layer["up"])
        x += dropout(hidden @ layer["down"], second)
    logits = normal(x, 1.0) @ params["tokens"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def attention(layer: Any, x: jax.Array) -> jax.Array:
    q, k, v = (
        part.reshape(*x.shape[:2], HEADS, -1) for part in jnp.split(x @ layer["qkv"], 3, axis=-1)
    )
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ layer["out"]


def normal(x: jax.Array, scale: Any) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale


def dropout(x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 1 - DROPOUT, x.shape), x / (1 - DROPOUT), 0.0)


if __name__ == "__main__":
    main()
