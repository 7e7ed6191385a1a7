"""Only what is asked for moves."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckptio
from ckptio.manifest import BLOCK


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Eleven transformer layers of width 2,048 in float32, 1.9 GB, sharded over eight devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    width, hidden = 2048, 8192
    shapes = {
        "attn_in": ((width, width // 4 * 5), P("data", "model")),
        "attn_out": ((width, width), P("model", "data")),
        "mlp_in": ((width, hidden), P("data", "model")),
        "mlp_out": ((hidden, width), P("model", "data")),
        "norm": ((4, width), P()),
    }
    # One array of each shape serves all layers under different paths: copies, so that none is tied.
    tree = {
        f"layer{i}": {
            name: jax.device_put(
                np.full(shape, i, np.float32) + np.arange(shape[1], dtype=np.float32),
                NamedSharding(mesh, spec),
            )
            for name, (shape, spec) in shapes.items()
        }
        for i in range(11)
    }
    uri = tmp_path_factory.mktemp("model") / "step-1"
    report = ckptio.save(uri, tree)
    assert report.leaves == 55
    assert report.nbytes > 1.89e9
    yield uri, tree
    ckptio.delete(uri)


def test_a_slice_reads_its_rows_and_at_most_two_blocks(model):
    uri, tree = model
    for path, rows in [
        ("layer3/norm", slice(1, 3)),
        ("layer7/mlp_out", slice(100, 103)),
        ("layer9/attn_in", slice(511, 513)),
        ("layer10/mlp_in", slice(0, 1024)),
    ]:
        layer, name = path.split("/")
        with ckptio.open(uri) as checkpoint:
            found = checkpoint[path][rows]
            assert np.array_equal(found, np.asarray(tree[layer][name])[rows])
            assert 0 < checkpoint.bytes_read <= found.nbytes + 2 * BLOCK


def test_rows_of_an_array_of_one_device_cost_two_blocks_at_most(tmp_path):
    host = np.arange(24_000_000, dtype=np.float32).reshape(24_000, 1000)  # 96 MB
    ckptio.save(tmp_path / "c", {"w": host, "other": host})
    for rows in [slice(5, 8), slice(0, 24_000, 23_999), slice(10_000, 14_000), slice(23_999, None)]:
        with ckptio.open(tmp_path / "c") as checkpoint:
            found = checkpoint["w"][rows]
            assert np.array_equal(found, host[rows])
            low, high = rows.start, rows.stop or 24_000
            assert checkpoint.bytes_read <= (high - low) * 4000 + 2 * BLOCK


def test_one_layer_costs_one_layer(model):
    uri, tree = model
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(tree["layer4"]))
    heard = []

    class Listen:
        @ckptio.hookimpl
        def ckptio_restore_finished(self, report):
            heard.append(report)

    plugin = Listen()
    ckptio.plugin_manager().register(plugin)
    try:
        back = ckptio.restore(uri, only="layer4/**")
    finally:
        ckptio.plugin_manager().unregister(plugin)
    assert np.array_equal(back["layer4"]["mlp_in"], tree["layer4"]["mlp_in"])
    assert heard[0].nbytes <= size + 4 * BLOCK
    assert heard[0].leaves == 5


def test_unverified_reads_are_exact(tmp_path):
    host = np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)
    ckptio.save(tmp_path / "c", {"w": host})
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    heard = []

    class Listen:
        @ckptio.hookimpl
        def ckptio_restore_finished(self, report):
            heard.append(report.nbytes)

    plugin = Listen()
    ckptio.plugin_manager().register(plugin)
    try:
        back = ckptio.restore(tmp_path / "c", sharding=NamedSharding(mesh, P("x")), verify=False)
    finally:
        ckptio.plugin_manager().unregister(plugin)
    assert np.array_equal(back["w"], host)
    assert heard == [host.nbytes]


def test_opening_reads_the_manifest_alone(model):
    uri, _ = model
    with ckptio.open(uri) as checkpoint:
        assert len(checkpoint.leaves) == 55
        assert checkpoint.tree["layer0"]["norm"].shape == (4, 2048)
        assert checkpoint.bytes_read == 0
