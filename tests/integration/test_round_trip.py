"""A pytree comes back as it went in, from every store."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple
from uuid import uuid4

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ckptio


def assert_same(a, b):
    """Same type, dtype, shape and bits; NumPy stands for JAX where a tree comes back as saved."""
    if isinstance(a, jax.Array) and jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
        assert a.dtype == b.dtype
        assert_same(jax.random.key_data(a), np.asarray(jax.random.key_data(b)))
    elif isinstance(a, jax.Array | np.ndarray):
        assert isinstance(b, jax.Array if isinstance(b, jax.Array) else np.ndarray)
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype.newbyteorder("=") == b.dtype
        assert a.shape == b.shape
        assert a.astype(b.dtype).tobytes() == b.tobytes()
    elif isinstance(a, float | complex):
        assert type(a) is type(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    else:
        assert type(a) is type(b)
        assert a == b


def assert_same_tree(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert_same(x, y)


SCALARS = {
    "ints": [0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**100, -(10**100)],
    "floats": [0.0, -0.0, 1e308, 5e-324, float("inf"), float("-inf"), float("nan")],
    "complex": [1 + 2j, complex(float("nan"), -0.0)],
    "bools": [True, False],
    "strings": ["", "plain", "ünï 日本 🙂", "nul\0", "\ud800"],
    "bytes": [b"", b"\0\xff" * 50],
    "numpy": [
        np.float16(1.5),
        np.int8(-3),
        np.bool_(True),
        np.str_("abc"),
        np.datetime64("2026-01-02T03:04:05", "s"),
        np.complex64(1j),
        np.timedelta64(5, "ms"),
    ],
}


def test_python_and_numpy_scalars(place):
    ckptio.save(**place.to, tree=SCALARS)
    assert_same_tree(SCALARS, ckptio.restore(**place.to))
    assert_same_tree(SCALARS, ckptio.restore(**place.to, like=SCALARS))


ARRAYS = {
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "reversed": np.arange(24).reshape(2, 3, 4)[::-1, :, ::-2],
    "swapped": np.arange(5, dtype=">i4"),
    "readonly": np.broadcast_to(np.float32(3), (4, 5)),
    "0-d": np.array(3.5),
    "empty": np.zeros((1, 0, 3), np.float16),
    "also empty": np.zeros(0, bool),
    "beside": np.ones(3),
    "strings": np.array(["", "日本語", "abc"]),
    "bytes": np.array([b"", b"\xff\x01"], "S5"),
    "times": np.array(["2026-01-01", "NaT"], "datetime64[ns]"),
    "durations": np.arange(3).astype("timedelta64[m]"),
    "complex128": np.array([1j, complex(0, float("nan"))]),
    "nan payload": np.array([0x7FF8000000000123], np.uint64).view(np.float64),
    "bools": np.array([[True], [False]]),
    "cube": np.arange(2 * 3 * 4 * 5, dtype=np.uint16).reshape(2, 3, 4, 5),
}


def test_numpy_arrays_of_every_layout(place):
    ckptio.save(**place.to, tree=ARRAYS)
    assert_same_tree(ARRAYS, ckptio.restore(**place.to))
    back = ckptio.restore(**place.to)
    back["beside"][0] = 7  # what comes back is the caller's own, to be written to


JAX_DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "float32",
    "complex64", "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn",
    "int2", "uint2", "int4", "uint4",
]  # fmt: skip


def test_jax_arrays_of_every_dtype(place):
    tree = {
        name: jnp.arange(-3 if name.startswith(("int", "float", "bf", "c")) else 0, 4).astype(
            getattr(ml_dtypes, name, name)
        )
        for name in JAX_DTYPES
        if hasattr(np, name) or hasattr(ml_dtypes, name)
    }
    assert len(tree) > 20
    ckptio.save(**place.to, tree=tree)
    assert_same_tree(tree, ckptio.restore(**place.to))
    back = ckptio.restore(**place.to, like=jax.eval_shape(lambda: tree))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(back))
    assert_same_tree(tree, back)


def test_typed_prng_keys_alone_in_arrays_and_nested(place):
    tree = {
        "one": jax.random.key(1),
        "many": jax.random.split(jax.random.key(2), (2, 3)),
        "nested": [{"rbg": jax.random.key(3, impl="rbg")}],
        "raw": jax.random.PRNGKey(4),
    }
    ckptio.save(**place.to, tree=tree)
    for back in [ckptio.restore(**place.to), ckptio.restore(**place.to, like=tree)]:
        assert_same_tree(tree, back)
        assert jax.random.normal(back["one"]) == jax.random.normal(tree["one"])
    wrong = {**tree, "one": jax.random.key(1, impl="rbg")}
    with pytest.raises(ckptio.MismatchError, match="one: holds threefry2x32 keys"):
        ckptio.restore(**place.to, like=wrong)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        [],
        (),
        None,
        {"a": {"b": [None, (), {}]}},
        5,
        "text",
        np.arange(3),
        {3: 1, 1: {2: 4}},
        {"a/b": 1, "~": 2, "": {"": 3}, "__metadata__": 4},
    ],
)
def test_odd_trees(place, tree):
    report = ckptio.save(**place.to, tree=tree)
    back = ckptio.restore(**place.to)
    assert_same_tree(tree, back)
    assert type(back) is type(tree)
    assert report.leaves == len(jax.tree.leaves(tree))
    if isinstance(tree, dict):
        assert [*back] == [*tree] or sorted(back) == sorted(tree)


class Batch(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: Any
    batch: Batch


def test_custom_nodes_come_back_through_a_target_and_plain_without(place):
    state = State(3, Batch(np.arange(2), [np.float32(1.5)]))
    ckptio.save(**place.to, tree=state)
    back = ckptio.restore(**place.to, like=state)
    assert isinstance(back, State)
    assert isinstance(back.batch, Batch)
    assert_same_tree(state, back)
    plain = ckptio.restore(**place.to)
    assert_same_tree({"step": 3, "batch": {"x": np.arange(2), "y": [np.float32(1.5)]}}, plain)


def test_a_flax_train_state_with_optax(place):
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 4)))
    tx = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adamw)(1e-3))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))
    ckptio.save(**place.to, tree=state)
    fresh = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    back = ckptio.restore(**place.to, like=jax.eval_shape(lambda: fresh).replace(step=0))
    assert_same_tree(state, back)
    again = back.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))
    assert_same_tree(again, state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params)))


def test_a_flax_nnx_state(place):
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    ckptio.save(**place.to, tree=state)
    abstract = nnx.state(nnx.eval_shape(lambda: nnx.Linear(3, 4, rngs=nnx.Rngs(1))))
    back = ckptio.restore(**place.to, like=abstract)
    assert_same_tree(state, back)
    nnx.update(model, back)


def test_tied_weights_come_back_twice_and_are_stored_once(place):
    shared, on_device = np.arange(100_000.0), jnp.arange(100_000.0)
    tree = {"a": shared, "b": [shared], "c": on_device, "d": on_device, "e": shared.copy()}
    report = ckptio.save(**place.to, tree=tree)
    assert report.nbytes < 2 * shared.nbytes + on_device.nbytes + 10_000
    assert_same_tree(tree, ckptio.restore(**place.to))


def test_metadata_and_the_time_come_back(place):
    metadata = {"loss": 0.5, "tags": ["a", None, True], "nested": {"x": 1}}
    ckptio.save(**place.to, tree={}, metadata=metadata)
    with ckptio.open(**place.to) as checkpoint:
        assert checkpoint.metadata == metadata
        assert checkpoint.created.tzinfo is not None


leaves = (
    st.integers()
    | st.floats()
    | st.booleans()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers()
    | hnp.arrays(
        st.sampled_from(["f4", "i8", "u1", "?", "c8", "f2", "U3", "S2", "M8[s]"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
trees = st.recursive(
    leaves | st.none(),
    lambda sub: (
        st.lists(sub, max_size=3)
        | st.lists(sub, max_size=3).map(tuple)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), sub, max_size=3)
        | st.dictionaries(st.integers(-9, 9), sub, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(trees)
def test_any_tree_comes_back(tree):
    uri = f"memory://any/{uuid4().hex}"
    ckptio.save(uri, tree)
    assert_same_tree(tree, ckptio.restore(uri))
    assert_same_tree(tree, ckptio.restore(uri, like=tree))
    with ckptio.open(uri) as checkpoint:
        checkpoint.verify()
    ckptio.delete(uri)
