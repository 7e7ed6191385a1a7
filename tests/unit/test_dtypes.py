"""Bits are bits: every dtype comes back from storage as it went in, whatever its memory layout."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckptio import dtypes
from ckptio.boxes import Box
from ckptio.dtypes import parse, stored
from ckptio.writer import _copy_range

ML_DTYPES = [name for name in dtypes._ML_DTYPES if hasattr(ml_dtypes, name)]
NAMES = [*dtypes._NUMPY, *ML_DTYPES]
OTHERS = [
    "S1",
    "S5",
    "U1",
    "U7",
    "datetime64[ns]",
    "datetime64[25s]",
    "timedelta64[D]",
    "datetime64",
]


def through_storage(array):
    """Store an array in two pieces, cut at an odd place, and read it back."""
    dtype, whole = stored(array.dtype), Box.whole(array.shape)
    out = np.zeros(dtype.stored_nbytes(array.size), np.uint8)
    cut = out.size // 2 // max(1, dtype.unit.itemsize) * dtype.unit.itemsize
    for a, b in [(0, cut), (cut, out.size)]:
        if a < b:
            _copy_range(dtype, whole, [(whole, array)], a, out[a:b])
    if dtype.bits < 8:
        units = dtype.unpack(out)[: array.size].reshape(array.shape)
    else:
        units = out.view(dtype.unit).reshape(dtype.units_shape(array.shape))
    return dtype.from_units(units)


def assert_same_bits(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (1, 0, 3), (3, 5), (2, 3, 5)])
def test_every_dtype_comes_back(name, shape):
    dtype = parse(name)
    assert stored(dtype.numpy) == dtype
    raw = np.random.default_rng(1).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if dtype.bits < 8 or name == "bool":
        array = (raw[..., 0] % 2).astype(dtype.numpy)
    elif name.startswith("U"):
        array = (raw.astype(np.uint32)[..., ::4] + 33).copy().view(dtype.numpy)[..., 0]
    else:
        array = raw.view(dtype.numpy)[..., 0]
    assert_same_bits(through_storage(array), array)


@pytest.mark.parametrize("name", ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"])
@pytest.mark.parametrize("size", range(10))
def test_every_sub_byte_value_comes_back_at_odd_lengths(name, size):
    dtype = parse(name)
    values = np.arange(size, dtype=np.uint8) % (1 << dtype.bits)
    array = dtype.unpack(dtype.pack(values))[:size].view(dtype.numpy)
    assert_same_bits(through_storage(array), array)
    assert dtype.stored_nbytes(size) == -(-size * dtype.bits // 8)


@pytest.mark.parametrize("name", ["int4", "int2"])
def test_signed_sub_byte_values_keep_their_sign(name):
    dtype = parse(name)
    low, high = -(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1
    array = np.arange(low, high + 1).astype(dtype.numpy)
    assert through_storage(array).astype(int).tolist() == [*range(low, high + 1)]


@pytest.mark.parametrize("name", ["float32", "int8", "complex128", "U3", "int4", "bfloat16", "S5"])
def test_any_memory_layout_is_read_in_c_order(name):
    dtype = parse(name).numpy
    base = np.arange(4 * 6 * 5).reshape(4, 6, 5) % 7
    base = base.astype(str).astype(dtype) if dtype.kind in "US" else base.astype(dtype)
    readonly = base.copy()
    readonly.flags.writeable = False
    views = [
        np.asfortranarray(base),
        base[::-1, ::2, ::-1],
        base.transpose(2, 0, 1),
        base[:, 1:3, 4],
        np.broadcast_to(base[0, 0], (3, 5)),
        readonly,
    ]
    for view in views:
        assert_same_bits(through_storage(view), np.ascontiguousarray(view))


@pytest.mark.parametrize("name", [">f4", ">i8", ">c16", ">U3", ">M8[s]"])
def test_byte_swapped_arrays_keep_their_values(name):
    array = np.arange(6).astype("U3").astype(name) if "U" in name else np.arange(6).astype(name)
    back = through_storage(array)
    assert back.dtype.isnative
    assert np.array_equal(back, array)


def test_nan_payloads_and_negative_zero_survive():
    bits = np.array([0x7FF8000000000123, 0xFFF0000000000001, 0x8000000000000000], np.uint64)
    assert through_storage(bits.view(np.float64)).view(np.uint64).tolist() == bits.tolist()


@given(
    hnp.arrays(
        hnp.scalar_dtypes().filter(lambda d: d.kind not in "g" and d.itemsize < 17),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    )
)
def test_whatever_numpy_makes_comes_back_or_is_refused(array):
    try:
        dtype = stored(array.dtype)
    except TypeError:
        assert array.dtype.kind in "VO" or array.dtype.itemsize == 0 or array.dtype.kind in "Mm"
        return
    back = through_storage(array)
    assert back.dtype == dtype.numpy == array.dtype.newbyteorder("=")
    assert back.tobytes() == array.astype(back.dtype).tobytes()


@pytest.mark.parametrize(
    "bad", [np.dtype(object), np.dtype("V8"), np.dtype([("a", "f4")]), np.dtype("g")]
)
def test_what_cannot_be_stored_is_refused(bad):
    with pytest.raises(TypeError, match="cannot be stored"):
        stored(bad)


@pytest.mark.parametrize(
    "name",
    [
        "float31",
        "",
        "U0",
        "U-1",
        "datetime64[fortnight]",
        "object",
        "O",
        "U9999999999",
        ">f4",
        "int4 ",
    ],
)
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match="unknown dtype"):
        parse(name)


@given(st.sampled_from(["int2", "uint4"]), st.binary(max_size=40))
def test_unpacking_inverts_packing(name, packed):
    dtype = parse(name)
    raw = np.frombuffer(packed, np.uint8)
    assert dtype.pack(dtype.unpack(raw)).tobytes() == packed
