"""Sizes as people read them."""

from __future__ import annotations

__all__ = ["format_bytes", "format_pace"]


def format_bytes(count: float) -> str:
    """Return a number of bytes in decimal units.

    Examples
    --------
    >>> format_bytes(1_894_000_000), format_bytes(12)
    ('1.89 GB', '12 B')
    """
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5:
            return f"{count:.3g} {unit}"
    return f"{count / 1000:.3g} PB"


def format_pace(nbytes: int, seconds: float) -> str:
    """Return how long some bytes took, and how many that is in a second.

    Examples
    --------
    >>> format_pace(1_894_000_000, 0.81)
    '0.81 s (2.34 GB/s)'
    """
    return f"{seconds:.2f} s ({format_bytes(nbytes / max(seconds, 1e-9))}/s)"
