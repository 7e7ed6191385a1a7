"""Progress bars, in a terminal and in a notebook, by tqdm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["track"]


def track(steps: Iterable[int], total: int, label: str, *, show: bool) -> Iterator[int]:
    """Pass steps of so many bytes through, showing bytes, rate and time left if asked to."""
    if not show:
        yield from steps
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1000) as bar:
        for step in steps:
            yield step
            bar.update(step)
