"""What a restore gives is what was asked for, or an error that lists every difference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckptio

TREE = {
    "params": {"layers": [{"w": np.full((4, 2), i, np.float32)} for i in range(3)]},
    "opt": {"mu": np.ones(3), "count": 5},
    "step": 7,
    "name": "run",
}


@pytest.fixture
def uri(tmp_path):
    ckptio.save(tmp_path / "c", TREE)
    return tmp_path / "c"


def test_every_difference_is_listed_at_once(uri):
    like = {
        "params": {
            "layers": [
                {"w": jax.ShapeDtypeStruct((4, 2), jnp.bfloat16)},
                {"w": np.zeros((2, 4), np.float32)},
            ]
        },
        "opt": {"mu": np.ones(3), "count": "five", "nu": np.ones(3)},
        "step": 7,
        "name": np.zeros(2),
    }
    with pytest.raises(ckptio.MismatchError) as caught:
        ckptio.restore(uri, like=like)
    lines = "\n".join(sorted(caught.value.differences))
    assert lines == "\n".join(
        [
            "name: is a Python str, wanted float64 [2]",
            "opt/count: is a Python int, wanted str",
            "opt/nu: missing in the checkpoint, wanted float64 [3]",
            "params/layers/0/w: is float32, wanted bfloat16 (cast=True converts)",
            "params/layers/1/w: has shape [4, 2], wanted [2, 4]",
            "params/layers/2/w: in the checkpoint (float32 [4, 2]), not in the target",
        ]
    )
    assert "6 differences" in str(caught.value)
    assert str(uri) in str(caught.value)


def test_strict_false_takes_the_intersection(uri):
    like = {
        "params": {"layers": [{"w": np.zeros((4, 2), np.float32)}, {"extra": np.float32(9)}]},
        "new": [jax.ShapeDtypeStruct((3,), jnp.float32)],
    }
    back = ckptio.restore(uri, like=like, strict=False)
    assert np.array_equal(back["params"]["layers"][0]["w"], TREE["params"]["layers"][0]["w"])
    assert back["params"]["layers"][1]["extra"] == 9
    assert back["new"] == like["new"]
    like["params"]["layers"][0]["w"] = np.zeros((4, 3), np.float32)
    with pytest.raises(ckptio.MismatchError, match="shape"):
        ckptio.restore(uri, like=like, strict=False)


def test_cast_converts_between_numbers(tmp_path):
    tree = {
        "w": np.array([1.5, -2.25], np.float32),
        "i": np.arange(3),
        "n": 3,
        "z": jnp.float32(2.5),
        "b": jnp.ones(4, jnp.bfloat16),
    }
    ckptio.save(tmp_path / "c", tree)
    like = {
        "w": jax.ShapeDtypeStruct((2,), jnp.bfloat16),
        "i": np.zeros(3, np.float16),
        "n": jax.ShapeDtypeStruct((), jnp.int32),
        "z": 1.0,
        "b": np.zeros(4, np.float64),
    }
    with pytest.raises(ckptio.MismatchError, match=r"5 differences"):
        ckptio.restore(tmp_path / "c", like=like)
    back = ckptio.restore(tmp_path / "c", like=like, cast=True)
    assert (back["w"].dtype, back["w"].tolist()) == (jnp.bfloat16, [1.5, -2.25])
    assert (back["i"].dtype, back["i"].tolist()) == (np.float16, [0, 1, 2])
    assert isinstance(back["n"], jax.Array)
    assert (back["n"].dtype, int(back["n"])) == (jnp.int32, 3)
    assert (type(back["z"]), back["z"]) == (float, 2.5)
    assert back["b"].tolist() == [1.0] * 4


def test_an_integer_array_fills_an_int_and_nothing_else_changes_its_kind(tmp_path):
    ckptio.save(tmp_path / "c", {"step": jnp.int32(7), "rate": jnp.float32(0.5)})
    back = ckptio.restore(tmp_path / "c", like={"step": 0, "rate": jnp.float32(0)})
    assert (type(back["step"]), back["step"]) == (int, 7)
    for wanted in [{"step": 0, "rate": 0.0}, {"step": True, "rate": jnp.float32(0)}]:
        with pytest.raises(ckptio.MismatchError, match="cast=True"):
            ckptio.restore(tmp_path / "c", like=wanted)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (np.ones(2, np.complex64), np.ones(2)),
        (np.array(["a"]), np.ones(1)),
        ("5", 5),
        (np.ones(1), np.array(["2026"], "M8[Y]")),
        (np.ones(2), 1.0),
    ],
)
def test_cast_refuses_what_would_lose_the_meaning(tmp_path, saved, wanted):
    ckptio.save(tmp_path / "c", {"x": saved})
    with pytest.raises(ckptio.MismatchError, match=r"x: is|x: has"):
        ckptio.restore(tmp_path / "c", like={"x": wanted}, cast=True)


def test_64_bit_values_are_never_narrowed_silently(tmp_path):
    ckptio.save(tmp_path / "c", {"x": np.array([2**40])})
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ckptio.MismatchError, match=r"x: is int64.*jax_enable_x64"):
        ckptio.restore(tmp_path / "c", sharding=device)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        back = ckptio.restore(tmp_path / "c", sharding=device)
        assert (back["x"].dtype, int(back["x"][0])) == (np.int64, 2**40)


def test_only_prunes_without_a_target_and_keeps_with_one(uri):
    assert ckptio.restore(uri, only="step") == {"step": 7}
    assert ckptio.restore(uri, only=["opt/c*", "name"]) == {"opt": {"count": 5}, "name": "run"}
    layer = ckptio.restore(uri, only="params/layers/1/**")
    assert layer["params"]["layers"][0] is None
    assert layer["params"]["layers"][1]["w"][0, 0] == 1
    like = {**TREE, "opt": {"mu": np.zeros(3), "count": 0}, "step": 0}
    back = ckptio.restore(uri, like=like, only="opt/**")
    assert (back["opt"]["count"], back["step"]) == (5, 0)
    assert back["opt"]["mu"].tolist() == [1, 1, 1]
    assert back["params"] is not None


def test_only_names_what_it_does_not_find(uri):
    with pytest.raises(ckptio.MismatchError, match=r"'params' matches no leaf.*'params/\*\*'"):
        ckptio.restore(uri, only="params")
    with pytest.raises(ckptio.MismatchError, match="'nothing/here' matches no leaf"):
        ckptio.restore(uri, only=["step", "nothing/here"])


def test_a_target_of_leaves_and_a_tree_of_the_checkpoint(uri):
    with ckptio.open(uri) as checkpoint:
        like = checkpoint.tree
        assert like["params"]["layers"][2]["w"].shape == (4, 2)
        back = ckptio.restore(uri, like=like)
        assert back["step"] == 7
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like["params"]
        )
        params = ckptio.restore(uri, like={"params": abstract}, only="params/**")["params"]
    assert isinstance(params["layers"][0]["w"], jax.Array)


def test_what_is_no_leaf_in_the_target_is_named(uri):
    with pytest.raises(ckptio.MismatchError, match="step: the target has a function"):
        ckptio.restore(uri, like={**TREE, "step": lambda: 1})


def test_a_leaf_reads_like_numpy(tmp_path):
    host = np.arange(4 * 5 * 6).reshape(4, 5, 6)
    ckptio.save(
        tmp_path / "c", {"a": host, "s": "text", "n": 2**80, "z": np.zeros((0, 3)), "step": 1}
    )
    with ckptio.open(tmp_path / "c") as checkpoint:
        leaf = checkpoint["a"]
        for index in [
            ..., 2, -1, (1, 2, 3), slice(None), slice(1, 3), (slice(None, None, -2), 3), (..., 1),
            (None, 2, ..., None), (slice(3, 1), 2), (slice(None), [0][0], slice(5, None, -3)),
            (np.int64(2), slice(-2, None)), (), slice(10, 20), (slice(0, 0), ..., 2),
        ]:  # fmt: skip
            found = leaf[index]
            assert isinstance(found, np.ndarray)
            assert np.array_equal(found, host[index]), index
            assert found.shape == np.asarray(host[index]).shape, index
        for bad in [4, -5, (0, 0, 0, 0), (..., ...), 1.5, [0, 1], True, "a", np.array([1])]:
            with pytest.raises(IndexError):
                leaf[bad]
        assert np.array_equal(np.asarray(leaf), host)
        assert np.asarray(leaf, np.float32).dtype == np.float32
        with pytest.raises(ValueError, match="copy"):
            np.array(leaf, copy=False)
        assert (len(leaf), leaf.ndim, leaf.size, leaf.nbytes) == (4, 3, 120, 960)
        assert checkpoint["s"].read() == "text"
        assert checkpoint["n"].read() == 2**80
        assert checkpoint["z"][...].shape == (0, 3)
        with pytest.raises(TypeError, match="'step' has no dimensions"):
            len(checkpoint["step"])


def test_a_missing_leaf_is_named_with_near_ones(uri):
    with ckptio.open(uri) as checkpoint:
        with pytest.raises(ckptio.LeafNotFoundError, match="did you mean 'opt/count'"):
            checkpoint["opt/cuont"]
        with pytest.raises(KeyError, match="container"):
            checkpoint["params"]
        assert "step" in checkpoint
        assert len(checkpoint) == 7
