"""What goes over the network is what has to, counted at the server."""

from __future__ import annotations

from uuid import uuid4

import jax
import numpy as np
import pytest
from places import SERVED
from servers.proxy import fault_proxy

import ckptio
from ckptio.manifest import BLOCK


@pytest.fixture(params=SERVED)
def far(request):
    """A place behind a proxy that counts what passes; and the proxy."""
    store = request.getfixturevalue(f"{request.param}_store")
    with fault_proxy(store.endpoint) as proxy:
        yield store.place(uuid4().hex, proxy.url), proxy


def is_data(request):
    """Whether a request moves a checkpoint's data, or a part of it."""
    return request.sent > 50_000 or request.received > 50_000


@pytest.mark.parametrize("sharded", [False, True])
def test_a_thousand_leaves_cost_a_few_round_trips(far, sharded):
    place, proxy = far
    devices = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    spec = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("x"))
    tree = {f"layer{i:04d}": np.full(8 * 1024, i, np.float32) for i in range(1000)}  # 33 MB
    if sharded:
        tree = jax.device_put(tree, spec)
    proxy.latency = 0.05
    ckptio.save(**place.to, tree=tree)
    beyond = [r for r in proxy.requests if not is_data(r)]
    assert len(beyond) <= 12, beyond
    assert len(proxy.requests) <= 12 + 33 // 4 + 2
    proxy.requests.clear()
    back = ckptio.restore(**place.to, sharding=spec if sharded else None)
    assert all(np.array_equal(back[name], tree[name]) for name in tree)
    beyond = [r for r in proxy.requests if not is_data(r)]
    assert len(beyond) <= 12, beyond
    assert len(proxy.requests) <= 12 + 33 // 4 + 2


def test_a_slice_moves_its_rows_and_at_most_two_blocks(far):
    place, proxy = far
    host = np.arange(16_000_000, dtype=np.float32).reshape(16_000, 1000)  # 64 MB
    ckptio.save(**place.to, tree={"w": host, "step": 1})
    with ckptio.open(**place.to) as checkpoint:
        for rows in [slice(5, 8), slice(7000, 9000), slice(15_999, None)]:
            proxy.requests.clear()
            found = checkpoint["w"][rows]
            assert np.array_equal(found, host[rows])
            moved = sum(r.received for r in proxy.requests)
            assert found.nbytes < moved <= found.nbytes + 2 * BLOCK + 10_000  # and HTTP's framing


def test_looking_costs_no_data(far):
    place, proxy = far
    ckptio.save(**place.to, tree={"w": np.zeros(1_000_000)})
    proxy.requests.clear()
    assert ckptio.exists(**place.to)
    assert len(proxy.requests) == 1
    with ckptio.open(**place.to) as checkpoint:
        assert checkpoint["w"].shape == (1_000_000,)
    assert sum(r.received for r in proxy.requests) < 50_000


def test_every_save_and_look_is_fresh(far):
    """Something else writes and deletes beside us: no cache may say otherwise."""
    place, _ = far
    assert not ckptio.exists(**place.to)
    for step in range(3):
        ckptio.save(**place.to, tree={"step": step}, overwrite=True)
        assert ckptio.restore(**place.to) == {"step": step}
    ckptio.delete(**place.to)
    assert not ckptio.exists(**place.to)
    with pytest.raises(ckptio.NotFoundError):
        ckptio.restore(**place.to)
    with ckptio.open_backend(place.uri, place.storage_options) as backend:
        assert [*backend.list()] == []
