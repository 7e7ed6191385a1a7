"""safetensors: one file, the arrays fetched to the host whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file


def _file(path: str) -> str:
    return f"{path}/model.safetensors"


def _named(tree: Any) -> dict[str, Any]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(key.key for key in keys): leaf for keys, leaf in flat}


def save(tree: Any, path: str) -> None:
    Path(path).mkdir(parents=True)
    save_file({name: np.asarray(leaf) for name, leaf in _named(tree).items()}, _file(path))


def restore(path: str, like: Any) -> Any:
    with safe_open(_file(path), framework="np") as file:
        found = [
            jax.device_put(file.get_tensor(name), leaf.sharding)
            for name, leaf in _named(like).items()
        ]
    return jax.tree.unflatten(jax.tree.structure(like), found)


def read_rows(path: str, leaf: str, rows: int) -> np.ndarray[Any, Any]:
    with safe_open(_file(path), framework="np") as file:
        return np.asarray(file.get_slice(leaf)[:rows])
