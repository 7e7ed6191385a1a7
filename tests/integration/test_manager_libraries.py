"""States of the libraries that people train with go through a run and come back to train on."""

from __future__ import annotations

import equinox
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import ckptio
from ckptio.manager import CheckpointManager

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = X.sum(1, keepdims=True)


def through(directory, state, like):
    """Save in one manager, restore in another."""
    with CheckpointManager(directory / "run") as manager:
        manager.save(7, state)
    with CheckpointManager(directory / "run") as manager:
        back, step = manager.restore_latest(like=like)
    assert step == 7
    return back


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = host(a), host(b)
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    return True


def host(leaf):
    key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if key else leaf)


def abstract(tree):
    return jax.eval_shape(lambda: tree)


class Network(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Dense(5)(x))
        return linen.Dense(1)(linen.BatchNorm(use_running_average=True)(x))


def test_a_flax_linen_train_state(tmp_path):
    network = Network()

    def fresh(seed):
        variables = network.init(jax.random.key(seed), X)
        return TrainState.create(
            apply_fn=network.apply, params=variables["params"], tx=optax.adam(1e-2)
        )

    @jax.jit
    def train(state):
        def loss(params):
            statistics = {"BatchNorm_0": {"mean": jnp.zeros(5), "var": jnp.ones(5)}}
            found = state.apply_fn({"params": params, "batch_stats": statistics}, X)
            return jnp.square(found - Y).mean()

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    state = train(train(fresh(0)))
    # A fresh state's step is a Python int, a trained one's an array: what is traced has arrays.
    like = abstract(fresh(1).replace(apply_fn=state.apply_fn, tx=state.tx))
    back = through(tmp_path, state, like)
    assert isinstance(back, TrainState)
    assert int(back.step) == 2
    assert same(back, state)
    assert same(train(back), train(state))
    with CheckpointManager(tmp_path / "run") as manager:
        assert int(manager.restore(7, like=fresh(2), cast=True).step) == 2
        params = manager.restore(7, only="params/**")
    assert [*params] == ["params"]
    assert same(params["params"], jax.tree.map(np.asarray, state.params))


def test_flax_nnx_modules_their_state_and_their_optimizer(tmp_path):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(3, 5, rngs=rngs)
            self.norm = nnx.BatchNorm(5, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.last = nnx.Linear(5, 1, rngs=rngs)

        def __call__(self, x):
            return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))

    def fresh(seed):
        model = Block(nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer):
        gradients = nnx.grad(lambda model: jnp.square(model(X) - Y).mean())(model)
        optimizer.update(model, gradients)

    model, optimizer = fresh(0)
    train(model, optimizer)
    state = nnx.state((model, optimizer))
    other = fresh(1)
    back = through(tmp_path, state, nnx.state(other))
    nnx.update(other, back)
    assert same(nnx.state(other), state)
    train(model, optimizer)
    train(*other)
    assert same(nnx.state(other), nnx.state((model, optimizer)))

    # The module itself is a pytree too, and comes back as one.
    whole = through(tmp_path / "module", model, fresh(2)[0])
    assert isinstance(whole, Block)
    assert same(nnx.state(whole), nnx.state(model))


def test_an_equinox_module_with_its_static_parts_and_state(tmp_path):
    class Net(equinox.Module):
        mlp: equinox.nn.MLP
        norm: equinox.nn.BatchNorm
        scale: float
        name: str = equinox.field(static=True)

        def __init__(self, key):
            self.mlp = equinox.nn.MLP(3, 1, 8, 2, key=key)
            self.norm = equinox.nn.BatchNorm(1, axis_name="batch", mode="ema")
            self.scale = 2.0
            self.name = "net"

        def __call__(self, x, state):
            y, state = self.norm(self.mlp(x), state)
            return self.scale * y, state

    def fresh(seed):
        return equinox.nn.make_with_state(Net)(jax.random.key(seed))

    def run(net, state):
        return jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(X, state)

    (net, state), (other, other_state) = fresh(0), fresh(1)
    _, state = run(net, state)
    dynamic, _ = equinox.partition((net, state), equinox.is_inexact_array)
    like, static = equinox.partition((other, other_state), equinox.is_inexact_array)
    back = through(tmp_path, dynamic, like)
    net_back, state_back = equinox.combine(back, static)
    assert isinstance(net_back, Net)
    (one, _), (two, _) = run(net, state), run(net_back, state_back)
    assert same(one, two)


@pytest.mark.parametrize("kind", ["chain", "masked", "inject", "multi", "accumulate", "ema"])
def test_optax_states(tmp_path, kind):
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3), "none": None}
    optimizer = {
        "chain": lambda: optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(mu_dtype=jnp.bfloat16),
            optax.scale(-1),
        ),
        "masked": lambda: optax.masked(optax.adam(1e-2), {"w": True, "b": False, "none": False}),
        "inject": lambda: optax.inject_hyperparams(optax.adamw)(
            learning_rate=optax.linear_schedule(1e-2, 0, 10), weight_decay=1e-4
        ),
        "multi": lambda: optax.multi_transform(
            {"a": optax.sgd(1e-1, momentum=0.9), "z": optax.set_to_zero()},
            {"w": "a", "b": "z", "none": "z"},
        ),
        "accumulate": lambda: optax.MultiSteps(optax.adam(1e-2), 3).gradient_transformation(),
        "ema": lambda: optax.chain(optax.adafactor(1e-2), optax.ema(0.9)),
    }[kind]()

    @jax.jit
    def train(params, state):
        gradients = jax.tree.map(jnp.sin, params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(2):
        params, state = train(params, state)
    back = through(tmp_path, (params, state), abstract((params, state)))
    assert same(back, (params, state))
    assert same(train(*back), train(params, state))


def pipelines():
    source = np.arange(40)
    dataset = grain.MapDataset.source(source).shuffle(seed=3).map(lambda x: x * 2).repeat()
    yield "map", lambda: iter(dataset.batch(4).to_iter_dataset())
    yield (
        "window",
        lambda: iter(
            grain.experimental.WindowShuffleIterDataset(
                dataset.to_iter_dataset(), window_size=7, seed=1
            ).batch(3)
        ),
    )
    yield (
        "mixed",
        lambda: iter(
            grain.MapDataset.mix(
                [dataset, grain.MapDataset.source(source + 100).repeat()], [0.7, 0.3]
            )
            .to_iter_dataset()
            .batch(5)
        ),
    )
    yield (
        "loader",
        lambda: iter(
            grain.DataLoader(
                data_source=source,
                sampler=grain.samplers.IndexSampler(40, shuffle=True, seed=5, num_epochs=None),
                operations=[grain.transforms.Batch(4)],
            )
        ),
    )


@pytest.mark.parametrize(("kind", "make"), [*pipelines()], ids=[kind for kind, _ in pipelines()])
def test_grain_iterators_go_on_where_they_were(tmp_path, kind, make):
    batches = make()
    for _ in range(7):
        next(batches)
    state = {"params": {"w": jnp.ones(3)}, "data": {"train": batches}, "step": 7}
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, state)
        expected = [np.asarray(next(batches)) for _ in range(15)]

    other = make()
    next(other)
    like = {"params": abstract({"w": jnp.ones(3)}), "data": {"train": other}, "step": 0}
    with CheckpointManager(tmp_path / "run") as manager:
        back, _ = manager.restore_latest(like=like)
        assert back["data"]["train"] is other
        found = [np.asarray(next(other)) for _ in range(15)]
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
        assert [*manager.restore(7, only="params/**")] == ["params"]
    assert ckptio.restore(manager.step_uri(7))["data"]["train"] is not None
