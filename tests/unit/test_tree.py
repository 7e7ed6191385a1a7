"""Pytrees keep their structure, their order and their names."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.errors import UnsupportedLeafError
from ckptio.tree import MAX_DEPTH, Pattern, flatten, leaf_numbers, prune, unflatten

keys = st.text(max_size=4) | st.sampled_from(["a/b", "~", "~1", "", "params"])
trees = st.recursive(
    st.integers() | st.none() | st.builds(dict) | st.builds(list) | st.builds(tuple),
    lambda sub: (
        st.lists(sub, max_size=4)
        | st.lists(sub, max_size=4).map(tuple)
        | st.dictionaries(
            keys.filter(lambda k: not any(0xD800 <= ord(c) < 0xE000 for c in k)), sub, max_size=4
        )
        | st.dictionaries(st.integers(-5, 5), sub, max_size=4)
    ),
    max_leaves=12,
)


@given(trees)
def test_a_tree_comes_back_with_jaxs_own_order(tree):
    structure, named = flatten(tree)
    leaves = [leaf for _, leaf in named]
    assert leaves == jax.tree.leaves(tree)
    back = unflatten(structure, leaves)
    assert back == tree
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert sorted(leaf_numbers(structure)) == [*range(len(leaves))]
    assert len({path for path, _ in named}) == len(named)


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: Any
    params: Any


@jax.tree_util.register_pytree_node_class
class Nameless:
    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_paths_are_the_key_paths():
    tree = {
        "params": {"layers": [{"kernel": 1}, {"kernel": 2}]},
        "a/b~c": 3,
        7: 4,
    }
    del tree[7]
    assert [path for path, _ in flatten(tree)[1]] == [
        "a~1b~0c",
        "params/layers/0/kernel",
        "params/layers/1/kernel",
    ]
    assert [path for path, _ in flatten({3: 1, 1: 2})[1]] == ["1", "3"]
    assert flatten(5) == (0, [("", 5)])


def test_custom_nodes_have_named_paths_and_become_plain_containers():
    tree = State(1, (Point(2, None), Nameless(3, 4), collections.OrderedDict(z=5, a=6)))
    structure, named = flatten(tree)
    assert [leaf for _, leaf in named] == jax.tree.leaves(tree)
    assert [path for path, _ in named] == [
        "step",
        "params/0/x",
        "params/1/0",
        "params/1/1",
        "params/2/z",
        "params/2/a",
    ]
    assert unflatten(structure, [1, 2, 3, 4, 5, 6]) == {
        "step": 1,
        "params": ({"x": 2, "y": None}, (3, 4), {"z": 5, "a": 6}),
    }


@pytest.mark.parametrize("key", [1.5, None, True, (1, 2), np.int64(3), 2**70, "\ud800"])
def test_other_keys_are_refused_by_name(key):
    with pytest.raises(UnsupportedLeafError, match="params"):
        flatten({"params": {key: 1}})


def test_keys_that_cannot_be_sorted_and_equal_paths_are_refused():
    with pytest.raises(UnsupportedLeafError, match="sorted"):
        flatten({1: 0, "1": 0})
    with pytest.raises(UnsupportedLeafError, match="'a'"):
        flatten(collections.OrderedDict([("a", 1), (Key("a"), 2)]))


class Key(str):
    """A string that equals no other."""

    __slots__ = ()

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)


def test_nesting_is_bounded_both_ways():
    deep = leaf = []
    for _ in range(MAX_DEPTH + 1):
        leaf.append([])
        leaf = leaf[0]
    with pytest.raises(UnsupportedLeafError, match="deeper"):
        flatten(deep)
    with pytest.raises(ValueError, match="deeper"):
        [*leaf_numbers(deep)]


@pytest.mark.parametrize(
    "bad",
    [
        True,
        "x",
        1.5,
        {"dict": [1]},
        {"tuple": 3},
        {},
        {"items": [["a"]]},
        {"items": [[1.5, 0]]},
        [[{"list": []}]],
    ],
)
def test_malformed_structures_are_refused(bad):
    with pytest.raises(ValueError, match=r"tree|items"):
        [*leaf_numbers(bad)]


@pytest.mark.parametrize(
    ("glob", "path", "expected"),
    [
        ("params/**", "params/a/b", True),
        ("params/**", "params", True),
        ("params/**", "paramsx/a", False),
        ("**/kernel", "kernel", True),
        ("**/kernel", "a/b/kernel", True),
        ("a/**/z", "a/z", True),
        ("a/**/z", "a/b/c/z", True),
        ("*/bias", "p/0/bias", False),
        ("a.b", "axb", False),
        ("layers/[0-2]/w", "layers/1/w", True),
        ("layers/[!0-2]/w", "layers/1/w", False),
        ("w[0]", "w[0]", True),
        ("?", "ab", False),
        ("*", "", True),
        ("**", "", True),
        ("a\nb", "a\nb", True),
    ],
)
def test_globs(glob, path, expected):
    assert Pattern(glob).matches(path) is expected


def test_pruning_keeps_positions_and_empty_containers_that_are_meant():
    tree = {
        "params": {"layers": [{"w": 1}, {"w": 2}], "none": None, "empty": {}},
        "opt": (3, {}),
        "e": [],
    }
    structure, named = flatten(tree)

    def only(globs):
        pattern = Pattern(globs)
        keep = [pattern.matches(path) for path, _ in named]
        return unflatten(prune(structure, keep, pattern), [leaf for _, leaf in named])

    assert only("**") == tree
    assert only("params/**") == {"params": tree["params"]}
    assert only("params/layers/1/**") == {"params": {"layers": [None, {"w": 2}]}}
    assert only(["opt/*", "params/layers/0/w"]) == {
        "params": {"layers": [{"w": 1}, None]},
        "opt": (3, {}),
    }
