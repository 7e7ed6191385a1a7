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


def allowed_memory(uri: str, storage_options: Any = None) -> int:
    """Return the extra memory that is promised at the most: the budget, and a part per thread."""
    with ckptio.open_backend(uri, storage_options) as backend:
        limits = backend.limits
    part = max(limits.part_size, limits.read_size)
    return ckptio.SaveOptions().memory + limits.concurrency * part
