"""What a save in the background keeps of a NumPy array is what the array held at the call."""

from __future__ import annotations

import random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio import leaves
from ckptio.boxes import Box
from ckptio.leaves import HostArray
from tests.strategies import shapes

dtypes = st.sampled_from(
    [np.uint8, np.float32, np.complex128, ml_dtypes.bfloat16, ">i4", "U3", "datetime64[s]"]
)


@st.composite
def arrays(draw):
    """An array of any strides: cut, stepped, reversed, transposed, repeated."""
    shape = draw(shapes)
    base = np.arange(int(np.prod(shape)) * 8).astype("u1")
    array = np.resize(base.astype(draw(dtypes)), [2 * n for n in shape])
    array = array[tuple(slice(None, None, draw(st.sampled_from([2, -2]))) for _ in shape)]
    array = array.transpose(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        array = np.broadcast_to(array, (draw(st.integers(1, 3)), *array.shape))
    return array


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    """Treat arrays of a few bytes as large ones, which are copied in pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaves, "LARGE", 16)
        yield


@given(arrays(), st.randoms())
def test_a_held_array_is_an_equal_copy_in_its_own_order(array: np.ndarray, random: random.Random):
    source = HostArray(array)
    pieces = source.hold()
    random.shuffle(pieces)  # they are run in any threads
    for piece in pieces:
        piece()
    ((box, held),) = source.read(Box.whole(array.shape))
    assert box == Box.whole(array.shape)
    assert held.dtype == array.dtype
    assert held.shape == array.shape
    assert held.tobytes() == array.tobytes()
    assert held.strides == array.copy(order="K").strides
    assert not np.shares_memory(held, array)
    if array.nbytes < 16 or not array.ndim:
        assert not pieces, "it is copied at once"
    else:
        assert len(pieces) > 1 or array.nbytes < 32 or max(array.shape) == 1
