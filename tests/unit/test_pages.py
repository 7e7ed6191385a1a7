"""Memory whose pages are at hand before it is written."""

from __future__ import annotations

import mmap
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ckptio import pages

PAGE = mmap.PAGESIZE


def resident(array):
    """Bytes of an array's pages that the system holds in memory, from its own account."""
    first, last = array.ctypes.data, array.ctypes.data + array.nbytes
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(first // PAGE * 8)
        entries = np.frombuffer(file.read(-(-(last - first) // PAGE) * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * PAGE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="as Linux does it")
def test_pages_are_there_before_the_first_write_and_only_those_inside():
    if pages._advise() is None:
        pytest.skip("this kernel is older than 5.14")
    memory = pages.ordinary(64 * PAGE)
    pages.prepare(memory[PAGE // 2 : -PAGE // 2])
    assert resident(memory) == 62 * PAGE
    assert not memory.any()


def test_prepared_memory_keeps_what_is_in_it():
    memory = pages.ordinary(1 << 20)
    memory[:] = 7
    with ThreadPoolExecutor(4) as pool:
        assert len([*pool.map(pages.prepare, [memory] * 16)]) == 16
    assert (memory == 7).all()


@pytest.mark.parametrize("shape", [(0,), (1,), (300, 2000)])
def test_what_is_small_or_has_gaps_is_left_alone(shape):
    array = np.arange(int(np.prod(shape)), dtype=np.uint32).reshape(shape)
    before = array.copy()
    pages.prepare(array[..., ::2])
    assert (array == before).all()
