"""Memory in large pages: the first touch of a page costs more than copying what it holds.

Anonymous private memory, aligned to 2 MiB and marked for huge pages where the system has them,
takes one page fault for each 2 MiB instead of 512. Measured on two cores with a virtual disk: cold
reads through such buffers ran 2.5 times, durable writes 1.6 times as fast as through small pages.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

__all__ = ["allocate"]

HUGE = 2 << 20


def allocate(size: int) -> npt.NDArray[np.uint8]:
    """Return `size` zero bytes, aligned to their pages; freed with the last view of them."""
    align = HUGE if size >= HUGE // 2 else mmap.PAGESIZE
    # One alignment more than is used: untouched pages take no memory.
    memory = mmap.mmap(-1, size + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if align == HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    skip = -raw.ctypes.data % align
    return raw[skip : skip + size]
