"""Objects with a state of their own are leaves, saved through it and restored in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckptio
from ckptio.manager import CheckpointManager


@dataclass(eq=False)
class Torch:
    """An object of PyTorch's convention."""

    state: Any = field(default_factory=dict)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@dataclass(eq=False)
class Iterator:
    """An object of Grain's convention."""

    state: Any = None

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


STATES = [
    {"a": [1, 2.5, "x", b"y", True, None], "b": {"deep": (1, [])}, "c": np.arange(3)},
    {7: "int", 8: {1: 2}},
    b"bytes",
    "text",
    12345678901234567890,
    (),
    {},
    None,
    [],
    [{"only": 1}],
    {"a/b": {"c~d": 1}},
]


@pytest.mark.parametrize("kind", [Torch, Iterator])
@pytest.mark.parametrize("saved", STATES, ids=map(repr, STATES))
def test_any_state_goes_back_into_the_object_of_the_target(tmp_path, kind, saved):
    tree = {"w": jnp.ones(3), "list": [kind(saved), 1], "k/e~y": (kind(saved),), "step": 3}
    other = kind({"something": "else"})
    like = {"w": jnp.zeros(3), "list": [other, 0], "k/e~y": (kind(5),), "step": 0}
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, tree)
        back, _ = manager.restore_latest(like=like)
    assert back["list"][0] is other
    for found in (back["list"][0].state, back["k/e~y"][0].state):
        assert repr(found) == repr(saved)
    assert (back["list"][1], back["step"], back["w"].tolist()) == (1, 3, [1, 1, 1])


def test_a_tree_that_is_one_object(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, Iterator({"next": 5}))
        other = Iterator()
        assert manager.restore(1, like=other) is other
        assert other.state == {"next": 5}
        assert manager.restore(1) == {"next": 5}


def test_numpy_generators_of_the_old_kind_are_such_objects(tmp_path):
    generator = np.random.RandomState(3)
    generator.standard_normal(5)
    other = np.random.RandomState(9)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"rng": generator})
        expected = generator.standard_normal(9)
        manager.restore_latest(like={"rng": other})
    assert other.standard_normal(9).tolist() == expected.tolist()


def test_inside_dataclasses_and_other_nodes(tmp_path):
    @jax.tree_util.register_dataclass
    @dataclass
    class State:
        params: Any
        data: Any

    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, State({"w": jnp.ones(2)}, Iterator([1, 2])))
        data = Iterator()
        back = manager.restore(1, like=State({"w": jnp.zeros(2)}, data))
    assert isinstance(back, State)
    assert back.data is data
    assert data.state == [1, 2]


def test_the_state_is_that_at_the_call(tmp_path):
    live = {"count": np.zeros(3), "seen": [1]}
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"data": Torch(live)})
        live["count"] += 1
        live["seen"].append(2)
        back = manager.restore(1)["data"]
    assert (back["count"].tolist(), back["seen"]) == ([0, 0, 0], [1])


def test_only_leaves_alone_what_it_does_not_match(tmp_path):
    tree = {"params": {"w": jnp.ones(2)}, "data": Iterator({"next": 5, "seed": 1})}
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, tree)
        assert manager.restore(1, only="data/**") == {"data": {"next": 5, "seed": 1}}
        fresh = Iterator("fresh")
        like = {"params": {"w": jnp.zeros(2)}, "data": fresh}
        back = manager.restore(1, like=like, only="params/**")
        assert back["data"] is fresh
        assert (fresh.state, back["params"]["w"].tolist()) == ("fresh", [1, 1])
        back = manager.restore(1, like=like, only="data/**")
        assert (fresh.state, back["params"]["w"].tolist()) == ({"next": 5, "seed": 1}, [0, 0])
        with pytest.raises(ckptio.MismatchError, match=r"a part of the state .* 'data/\*\*'"):
            manager.restore(1, like=like, only="data/next")


def test_a_restore_that_fails_changes_no_object(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": jnp.ones(2), "data": Iterator([1])})
        fresh = Iterator("fresh")
        with pytest.raises(ckptio.MismatchError, match="w: has shape"):
            manager.restore(1, like={"w": jnp.zeros(3), "data": fresh})
        (data,) = (tmp_path / "run").rglob("*.safetensors")
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
        with pytest.raises(ckptio.CorruptionError):
            manager.restore_latest(like={"w": jnp.zeros(2), "data": fresh}, default=None)
    assert fresh.state == "fresh"


def test_an_object_that_was_not_saved_is_a_difference_unless_not_strict(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": jnp.ones(2)})
        like = {"w": jnp.zeros(2), "data": Iterator("fresh")}
        with pytest.raises(ckptio.MismatchError, match="data: missing in the checkpoint"):
            manager.restore(1, like=like)
        back = manager.restore(1, like=like, strict=False)
        assert (back["data"].state, back["w"].tolist()) == ("fresh", [1, 1])


def test_classes_are_no_objects_with_a_state(tmp_path):
    with (
        CheckpointManager(tmp_path / "run") as manager,
        pytest.raises(ckptio.UnsupportedLeafError, match="'kind'"),
    ):
        manager.save(1, {"kind": Iterator})
