"""Checking blocks as their bytes come: however they are cut."""

from __future__ import annotations

import itertools

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptio.block_check import BlockCheck
from ckptio.chunk_table import BLOCK

SIZE = 2 * BLOCK + 12345
DATA = np.random.default_rng(0).bytes(SIZE)
SUMS = np.array(
    [xxhash.xxh3_64_intdigest(DATA[at : at + BLOCK]) for at in range(0, SIZE, BLOCK)], np.uint64
)


def found(data, start, stop, cuts):
    """The first damaged block that a check of some bytes finds, cut anywhere."""
    check = BlockCheck(SUMS, start, stop)
    edges = [start, *sorted(cut for cut in cuts if start < cut < stop), stop]
    for lo, hi in itertools.pairwise(edges):
        if block := check.damaged(memoryview(data)[lo:hi]):
            return block
    return None


@given(st.integers(0, 2), st.integers(1, 3), st.sets(st.integers(0, SIZE), max_size=9))
def test_what_was_saved_passes_however_it_is_cut(first, count, cuts):
    assert found(DATA, first * BLOCK, min((first + count) * BLOCK, SIZE), cuts) is None


@given(st.integers(0, SIZE - 1), st.integers(0, 7), st.sets(st.integers(0, SIZE), max_size=9))
def test_one_flipped_bit_is_found_in_its_block(at, bit, cuts):
    data = bytearray(DATA)
    data[at] ^= 1 << bit
    first = at // BLOCK * BLOCK
    assert found(data, 0, SIZE, cuts) == (first, min(first + BLOCK, SIZE))
