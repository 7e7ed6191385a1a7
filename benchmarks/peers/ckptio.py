"""ckptio itself, with its defaults."""

from __future__ import annotations

from typing import Any

import numpy as np

import ckptio


def save(tree: Any, path: str, storage_options: Any = None) -> None:
    ckptio.save(path, tree, storage_options=storage_options)


def restore(path: str, like: Any, storage_options: Any = None) -> Any:
    return ckptio.restore(path, like=like, strict=False, storage_options=storage_options)


def read_rows(path: str, leaf: str, rows: int) -> np.ndarray[Any, Any]:
    with ckptio.open(path) as checkpoint:
        return np.asarray(checkpoint[leaf][:rows])
