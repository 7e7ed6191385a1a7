"""Metrics of a step, kept in its checkpoint's metadata beside the user's own.

    {"ckptio.manager": {"step": 100, "metrics": {"loss": 1.5, "accuracy": "nan"}}, …}

NaN and the infinities, which JSON lacks, are strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from ckptio.errors import InvalidOptionError
from ckptio.keep import Facts
from ckptio.manifest import Manifest

__all__ = ["KEY", "as_floats", "facts_of", "metadata_with"]

KEY = "ckptio.manager"
"""Under which key of a checkpoint's metadata the manager keeps what it knows."""


def as_floats(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as floats; NumPy's and JAX's scalars too, which may wait for a device.

    Raises
    ------
    InvalidOptionError
        If one is not a number.
    """
    found = {}
    for name, value in (metrics or {}).items():
        try:
            if not isinstance(name, str) or isinstance(value, str | bytes):
                raise TypeError("metrics are numbers by name")
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidOptionError(f"metric {name!r} is no number: {value!r}") from error
    return found


def metadata_with(
    metadata: Mapping[str, Any] | None, step: int, metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Return the metadata to save: the user's, and what the manager wants to know later."""
    if metadata and KEY in metadata:
        raise InvalidOptionError(f"the key {KEY!r} of the metadata is the manager's own")
    stored = {name: v if isfinite(v) else str(v) for name, v in metrics.items()}
    return {**(metadata or {}), KEY: {"step": step, "metrics": stored}}


def facts_of(manifest: Manifest) -> Facts:
    """Return what a manifest says of its step; one that a manager did not write has no metrics."""
    entry = manifest.metadata.get(KEY)
    stored = entry.get("metrics") if isinstance(entry, dict) else None
    metrics = {}
    for name, value in stored.items() if isinstance(stored, dict) else ():
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError):
            continue  # written by something else
    return Facts(manifest.created, metrics)
