"""The same training in JAX, an optional dependency of the benchmark: `pip install 'fedattune[bench]'`.

`one_by_one` works as the fastest peer (fedjax) does: one compiled function per client scans over its steps, with
donated parameters and data on the device. `all_at_once` does the same over all clients by `vmap`. If clients have
unequal numbers of steps, `one_by_one` runs each client's own number, and `all_at_once` the longest.
"""

import importlib.util
from typing import Any

import numpy as np
import torch

from .floors import Models, Orders, Train
from .problems import Problem

MISSING = None if importlib.util.find_spec("jax") else "JAX is not installed: pip install 'fedattune[bench]'"


def one_by_one(problem: Problem) -> Train:
    """Train with a compiled scan over the steps of one client, called for each client."""
    import jax

    data, start, step = _pieces(problem)
    ragged = len({(used, problem.size(i)) for i, (_, used) in enumerate(problem.draws)}) > 1

    def train_client(w: Any, index: Any, n: Any) -> Any:
        if not ragged:  # all clients have the same number of steps, so that XLA may know it
            return jax.lax.scan(lambda w, i: (step(w, data, i), None), w, index)[0]
        return jax.lax.fori_loop(0, n, lambda t, w: step(w, data, index[t]), w)

    compiled = jax.jit(train_client, donate_argnums=0)
    copy = jax.jit(lambda w: [a.copy() for a in w])

    def train(orders: Orders) -> Models:
        index, counts = _index(problem, orders)
        trained = [compiled(copy(start), i, n) for i, n in zip(index, counts, strict=True)]
        return _models([np.stack([np.asarray(t[k]) for t in trained]) for k in range(len(start))])

    return train


def all_at_once(problem: Problem) -> Train:
    """Train with a compiled scan over the steps of all clients, mapped over the clients."""
    import jax
    import jax.numpy as jnp

    data, start, step = _pieces(problem)

    def train_all(w: Any, index: Any) -> Any:
        every = jax.vmap(lambda w, i: step(w, data, i))
        return jax.lax.scan(lambda w, i: (every(w, i), None), w, index)[0]

    compiled = jax.jit(train_all, donate_argnums=0)
    clients = problem.data.n_clients
    repeat = jax.jit(lambda w: [jnp.repeat(a[None], clients, 0) for a in w])

    def train(orders: Orders) -> Models:
        index, _ = _index(problem, orders)
        trained = compiled(repeat(start), index.swapaxes(0, 1))
        return _models([np.asarray(t) for t in trained])

    return train


def _models(arrays: list[Any]) -> Models:
    """Return JAX's trained models as tensors; wait until they are ready."""
    return [torch.from_numpy(np.array(a, copy=not a.flags.writeable)) for a in arrays]


def _index(problem: Problem, orders: Orders) -> tuple[Any, Any]:
    """Lay out row numbers (C, steps, B) in the data of all clients, -1 for padding; count each client's steps (C,)."""
    first = np.cumsum([0, *(n for n, _ in problem.draws)])
    steps = [-(-len(o) // problem.size(i)) for i, o in enumerate(orders)]
    index = np.full((len(orders), max(steps), problem.batch), -1, dtype=np.int32)
    for client, (row, order) in enumerate(zip(index, orders, strict=True)):
        size, n = problem.size(client), len(order)
        flat = np.full(steps[client] * size, -1, dtype=np.int32)
        flat[:n] = order.numpy() + first[client]
        row[: steps[client], :size] = flat.reshape(-1, size)
    return index, np.array(steps, dtype=np.int32)


def _pieces(problem: Problem) -> tuple[Any, Any, Any]:
    """Return the data (x, y) of all clients on the device, the initial weights, and one step of SGD on some rows."""
    import jax
    import jax.numpy as jnp

    x = jnp.asarray(torch.cat([x.flatten(1) for x, _ in problem.own]).numpy())
    y = jnp.asarray(torch.cat([y for _, y in problem.own]).numpy().astype(np.int32))
    start = [jnp.asarray(p.numpy()) for p in problem.task.params.values()]
    padded = any(used % problem.size(i) or problem.size(i) < problem.batch for i, (_, used) in enumerate(problem.draws))
    uneven = len({used for _, used in problem.draws}) > 1

    def loss(w: Any, xb: Any, yb: Any, real: Any) -> Any:
        h = xb
        for k in range(0, len(w) - 2, 2):
            h = jax.nn.relu(h @ w[k].T + w[k + 1])
        logits = h @ w[-2].T + w[-1]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), yb[:, None], 1)[:, 0]
        if not (padded or uneven):
            return losses.mean()
        return (losses * real).sum() / jnp.maximum(real.sum(), 1)

    def step(w: Any, data: Any, index: Any) -> Any:
        rows = jnp.maximum(index, 0)
        g = jax.grad(loss)(w, data[0][rows], data[1][rows], (index >= 0).astype(jnp.float32))
        return [a - problem.lr * b for a, b in zip(w, g, strict=True)]

    return (x, y), start, step
