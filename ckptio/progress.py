"""Progress bars, in a terminal and in a notebook, by tqdm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

__all__ = ["bar", "track"]


@contextmanager
def bar(total: int, label: str, *, show: bool) -> Iterator[Callable[[int], object]]:
    """Show bytes, rate and time left, if asked to; give what is to be told each step's bytes."""
    if not show:
        yield lambda nbytes: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1000) as shown:
        yield shown.update


def track(steps: Iterable[int], total: int, label: str, *, show: bool) -> Iterator[int]:
    """Pass steps of so many bytes through, showing a bar if asked to."""
    with bar(total, label, show=show) as update:
        for step in steps:
            yield step
            update(step)
