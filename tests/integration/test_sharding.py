"""Saved on some devices, restored on any others, or on none."""

from __future__ import annotations

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ckptio
from ckptio import SaveOptions
from ckptio.arrays import SMALL
from ckptio.testing import FaultyBackend


def mesh(shape, names="xyz"):
    devices = np.array(jax.devices()[: int(np.prod(shape))])
    return jax.sharding.Mesh(devices.reshape(shape), tuple(names[: len(shape)]))


def counted(shape, dtype=np.float32):
    return np.arange(np.prod(shape), dtype=np.int64).astype(dtype).reshape(shape)


SPECS = [P(), P("x"), P(None, "x"), P("x", "y"), P(("x", "y")), P("y", "x"), P(("y", "x"), None)]


@pytest.fixture
def backends():
    """Every backend that is opened, wrapped so that its calls are counted."""
    opened = []

    class Count:
        @ckptio.hookimpl
        def ckptio_wrap_backend(self, backend):
            opened.append(FaultyBackend(backend))
            return opened[-1]

    plugin = Count()
    ckptio.plugin_manager().register(plugin)
    yield opened
    ckptio.plugin_manager().unregister(plugin)


def test_any_named_sharding_comes_back_on_itself_on_others_and_on_none(place):
    four_by_two = mesh((4, 2))
    host = counted((64, 512))  # more than is fetched whole
    assert host.nbytes > SMALL
    tree = {
        str(i): jax.device_put(host, NamedSharding(four_by_two, s)) for i, s in enumerate(SPECS)
    }
    ckptio.save(**place.to, tree=tree)
    for found in ckptio.restore(**place.to).values():
        assert isinstance(found, np.ndarray)
        assert np.array_equal(found, host)
    same = ckptio.restore(**place.to, like=tree)
    for name, array in same.items():
        assert array.sharding == tree[name].sharding
        assert np.array_equal(array, host)
    targets = [
        NamedSharding(mesh((8,)), P("x")),
        NamedSharding(mesh((2, 2)), P("y", "x")),
        NamedSharding(mesh((2, 2, 2)), P(("x", "z"), "y")),
        NamedSharding(mesh((2,)), P()),
        SingleDeviceSharding(jax.devices()[5]),
    ]
    for target in targets:
        for array in ckptio.restore(**place.to, sharding=target).values():
            assert array.sharding == target
            assert np.array_equal(array, host)


def test_permuted_devices_and_unused_axes(place):
    devices = [*reversed(jax.devices())]
    permuted = jax.sharding.Mesh(np.array(devices).reshape(2, 4), ("a", "b"))
    host = counted((40, 1024))
    tree = {
        "a": jax.device_put(host, NamedSharding(permuted, P(None, "b"))),
        "b": jax.device_put(host, NamedSharding(permuted, P("a"))),
    }
    ckptio.save(**place.to, tree=tree)
    back = ckptio.restore(**place.to, like=tree)
    for name in tree:
        for ours, theirs in zip(
            back[name].addressable_shards, tree[name].addressable_shards, strict=True
        ):
            assert ours.device == theirs.device
            assert np.array_equal(ours.data, theirs.data)


def test_replicas_are_written_once_and_read_once(place, backends):
    eight = mesh((8,))
    host = counted((1 << 20,))
    tree = {"r": jax.device_put(host, NamedSharding(eight, P()))}
    report = ckptio.save(**place.to, tree=tree)
    assert report.nbytes < 1.1 * host.nbytes
    backends.clear()
    array = ckptio.restore(**place.to, like=tree)["r"]
    assert backends[0].nbytes("read_into") < 1.1 * host.nbytes + (1 << 20)
    assert np.array_equal(array, host)
    pointers = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
    assert len(pointers) == 1, "sixteen devices of one host share one copy"


def test_each_byte_is_read_once_when_resharding(place, backends):
    host = counted((512, 4096))
    ckptio.save(
        **place.to, tree={"w": jax.device_put(host, NamedSharding(mesh((4, 2)), P("x", "y")))}
    )
    backends.clear()
    array = ckptio.restore(**place.to, sharding=NamedSharding(mesh((2, 4)), P("y", "x")))["w"]
    assert np.array_equal(array, host)
    data = [
        call
        for call in backends[0].calls
        if call.method == "read_into" and call.key != "manifest.json"
    ]
    ranges = sorted((call.start, call.start + call.nbytes) for call in data)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert sum(call.nbytes for call in data) < host.nbytes + 10_000


def test_what_one_process_holds_is_stored_whole_and_zero_size_not_at_all(place):
    eight = NamedSharding(mesh((8,)), P(None, "x"))
    tree = {
        "large": jax.device_put(counted((64, 1024)), eight),
        "small": jax.device_put(counted((4, 8)), eight),
        "none": jax.device_put(jnp.zeros((0, 8, 3)), eight),
        "scalar": jnp.float32(3),
    }
    ckptio.save(**place.to, tree=tree)
    with ckptio.open(**place.to) as checkpoint:
        assert checkpoint.manifest.chunks.counts.tolist() == [1, 0, 1, 1]
        assert str(checkpoint["small"].sharding) == "(-, x) on 8"
    back = ckptio.restore(**place.to, like=tree)
    assert back["none"].shape == (0, 8, 3)
    assert back["small"].sharding == eight
    assert np.array_equal(back["small"], tree["small"])
    assert not back["scalar"].committed, "free to be moved, as it was"


def test_prng_keys_keep_their_sharding(place):
    eight = NamedSharding(mesh((8,)), P("x"))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 16), eight)
    ckptio.save(**place.to, tree={"k": keys})
    for back in [
        ckptio.restore(**place.to, like={"k": keys}),
        ckptio.restore(**place.to, sharding=eight),
    ]:
        assert back["k"].sharding == eight
        assert (jax.random.key_data(back["k"]) == jax.random.key_data(keys)).all()


def test_a_function_decides_by_leaf(place):
    host = counted((64, 1024))
    ckptio.save(**place.to, tree={"a": host, "b": host, "s": "text"})
    sharding = NamedSharding(mesh((8,)), P("x"))
    back = ckptio.restore(**place.to, sharding=lambda leaf: sharding if leaf.path == "a" else None)
    assert back["a"].sharding == sharding
    assert isinstance(back["b"], np.ndarray)
    assert back["s"] == "text"


def test_one_sharding_for_all_replicates_scalars_and_leaves_strings_alone(place):
    sharding = NamedSharding(mesh((8,)), P("x"))
    tree = {
        "w": counted((8, 3)),
        "count": np.int32(3),
        "step": jnp.int32(4),
        "n": 7,
        "names": np.array(["a", "b"]),
    }
    ckptio.save(**place.to, tree=tree)
    back = ckptio.restore(**place.to, sharding=sharding)
    assert back["w"].sharding == sharding
    assert back["step"].sharding.is_fully_replicated
    assert (type(back["count"]), type(back["n"])) == (np.int32, int)
    assert isinstance(back["names"], np.ndarray)


def test_a_dimension_that_the_mesh_does_not_divide_is_an_error_that_lists_all(place):
    ckptio.save(**place.to, tree={"a": counted((7,)), "b": counted((9,)), "c": counted((8,))})
    with pytest.raises(ckptio.MismatchError, match=r"2 differences") as caught:
        ckptio.restore(**place.to, sharding=NamedSharding(mesh((8,)), P("x")))
    assert [line.split(":")[0] for line in caught.value.differences] == ["a", "b"]


def test_restoring_under_a_mesh_in_force_from_an_abstract_state(place):
    explicit = (jax.sharding.AxisType.Explicit,) * 2  # so that abstract values have shardings
    four_by_two = jax.make_mesh((4, 2), ("x", "y"), axis_types=explicit)
    with jax.set_mesh(four_by_two):
        state = {
            "w": jax.device_put(counted((64, 1024)), NamedSharding(four_by_two, P("x", "y"))),
            "n": jnp.zeros(3),
        }
        abstract = jax.eval_shape(lambda s: jax.tree.map(lambda x: x * 2, s), state)
        ckptio.save(**place.to, tree=state)
        back = ckptio.restore(**place.to, like=abstract)
        assert np.array_equal(back["w"], state["w"])
        assert back["w"].sharding == state["w"].sharding
    with pytest.raises(ckptio.MismatchError, match=r"w: .*set_mesh"):
        ckptio.restore(**place.to, like=abstract)


@pytest.mark.parametrize("memory", [4 << 20, 16 << 20])
def test_a_leaf_larger_than_the_memory_budget_streams_both_ways(place, memory):
    host = counted((3 << 20, 4))  # 48 MiB
    tree = {
        "big": jax.device_put(host, SingleDeviceSharding(jax.devices()[0])),
        "strided": host[:, ::2],
    }
    ckptio.save(**place.to, tree=tree, options=SaveOptions(memory=memory))
    back = ckptio.restore(**place.to, options=ckptio.RestoreOptions(memory=memory))
    assert np.array_equal(back["big"], host)
    assert np.array_equal(back["strided"], host[:, ::2])


def test_objects_close_at_their_target_size_and_parts_are_uploaded(place, backends):
    tree = {str(i): counted((1 << 18,)) for i in range(20)}  # 20 MiB
    report = ckptio.save(
        **place.to, tree=tree, options=SaveOptions(object_size=9 << 20, part_size=1)
    )
    assert report.objects == 3
    assert backends[0].count("write_part") >= 4  # two objects of more than one part each
    back = ckptio.restore(**place.to)
    assert all(np.array_equal(back[name], tree[name]) for name in tree)


def test_saving_leaves_the_callers_arrays_as_they_were():
    """Looking up an array's shards is not thread-safe in JAX: the writers must not do it."""
    eight = NamedSharding(mesh((4, 2)), P("x", "y"))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(10):
            host = counted((512, 2048))
            tree = [jax.device_put(host, eight) + 0 for _ in range(8)]
            ckptio.save("memory://callers/arrays", tree, overwrite=True)
            for array in tree:
                assert len(array.addressable_shards) == 8
                jax.device_put(array, jax.devices()[0]).block_until_ready()
    finally:
        sys.setswitchinterval(interval)


def test_three_thousand_small_leaves_are_two_objects(place, backends):
    tree = {f"layer{i}": np.full(500, i, np.float32) for i in range(3000)}
    report = ckptio.save(**place.to, tree=tree)
    assert report.objects == 1
    assert backends[0].count("put") + backends[0].count("complete") == 2
    back = ckptio.restore(**place.to)
    assert all(np.array_equal(back[name], tree[name]) for name in tree)
    assert backends[1].count("read_into") <= 4


@settings(max_examples=40)
@given(st.data())
def test_any_sharding_onto_any_other(data):
    """Shapes that both meshes divide, with replicated and doubly divided dimensions."""
    rank = data.draw(st.integers(1, 3))
    shape = tuple(8 * data.draw(st.integers(1, 6)) for _ in range(rank))
    dtype = data.draw(st.sampled_from([np.float32, np.int8, jnp.bfloat16, jnp.int4, np.complex64]))

    def sharding():
        sizes = data.draw(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (2, 2), (1,), (4,)]))
        names = list("xyz"[: len(sizes)])
        spec = [[] for _ in range(rank)]
        for name in names:
            where = data.draw(st.integers(-1, rank - 1))
            if where >= 0:
                spec[where].append(name)
        return NamedSharding(mesh(sizes), P(*[tuple(axes) or None for axes in spec]))

    host = (np.arange(np.prod(shape)) % 7).astype(dtype).reshape(shape)
    before, after = sharding(), sharding()
    # Small arrays are fetched whole: make these be put together from their shards.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptio.arrays.SMALL", 0)
        ckptio.save("memory://reshard/x", {"w": jax.device_put(host, before)}, overwrite=True)
    back = ckptio.restore("memory://reshard/x", sharding=after)["w"]
    assert back.sharding == after
    assert np.asarray(back).tobytes() == host.tobytes()
    assert ckptio.restore("memory://reshard/x")["w"].tobytes() == host.tobytes()


@given(
    order=st.permutations(range(8)),
    spec=st.sampled_from(SPECS),
    dtype=st.sampled_from([np.float32, jnp.bfloat16, jnp.int4, np.bool_]),
    onto=st.sampled_from(SPECS),
)
@settings(max_examples=25, deadline=None)
def test_small_arrays_go_whole_whatever_the_order_of_their_devices(order, spec, dtype, onto):
    devices = np.array(jax.devices())[list(order)].reshape(4, 2)
    one = jax.sharding.Mesh(devices, ("x", "y"))
    other = jax.sharding.Mesh(devices.T.reshape(4, 2)[::-1], ("x", "y"))
    host = (counted((8, 16)) % 5).astype(dtype)
    shards = [
        jax.device_put(host[index], device)
        for device, index in NamedSharding(one, spec).devices_indices_map(host.shape).items()
    ]
    # Brought in another order than the sharding's: JAX sorts them.
    array = jax.make_array_from_single_device_arrays(
        host.shape, NamedSharding(one, spec), shards[::-1]
    )
    ckptio.save("memory://small/whole", {"w": array, "key": jax.random.key(3)}, overwrite=True)
    back = ckptio.restore("memory://small/whole", sharding=NamedSharding(other, onto))
    assert back["w"].sharding == NamedSharding(other, onto)
    for shard in back["w"].addressable_shards:
        assert np.asarray(shard.data).tobytes() == host[shard.index].tobytes()
    assert jax.random.key_data(back["key"]).tolist() == [0, 3]
