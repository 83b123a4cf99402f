"""Fills memory with models, graphs and matrices of a package from PyPI: `models.py PACKAGE`."""

import sys


def of_scipy():
    import numpy as np
    from scipy import sparse
    from scipy.sparse.csgraph import connected_components

    size = 300_000
    pick = np.random.default_rng(1)
    places = pick.integers(0, size, (2, 1_500_000))
    one = sparse.coo_array((pick.random(1_500_000), places), shape=(size, size)).tocsr()
    product = (one @ one).tocsr()
    parts, _ = connected_components(one, directed=False)
    vector = np.ones(size)
    for _ in range(20):
        vector = one @ vector + 1
    return product.nnz, parts, f"{vector.sum():.6e}"


def of_sklearn():
    import numpy as np
    from sklearn.cluster import MiniBatchKMeans
    from sklearn.ensemble import RandomForestClassifier

    pick = np.random.default_rng(1)
    points = pick.normal(size=(30_000, 20))
    labels = (points[:, :3].sum(axis=1) > 0).astype(int)
    forest = RandomForestClassifier(40, random_state=1, n_jobs=2).fit(points, labels)
    means = MiniBatchKMeans(16, random_state=1, n_init=2).fit(points)
    return int(forest.predict(points).sum()), f"{forest.score(points, labels):.4f}", means.n_clusters


def of_lightgbm():
    import lightgbm
    import numpy as np

    pick = np.random.default_rng(1)
    points = pick.normal(size=(200_000, 30))
    target = points[:, 0] * 2 + points[:, 1] ** 2
    options = {"objective": "regression", "num_threads": 2, "verbose": -1, "deterministic": True}
    model = lightgbm.train({**options, "force_row_wise": True, "seed": 1}, lightgbm.Dataset(points, target), 30)
    return f"{model.predict(points[:50000], num_threads=2).sum():.3f}", model.num_trees()


def of_numba():
    import numba
    import numpy as np

    @numba.njit
    def sieve(size):
        flags = np.ones(size, np.bool_)
        counts = np.zeros(size // 8, np.int64)
        for i in range(2, size):
            if flags[i]:
                counts[i % counts.size] += 1
                for j in range(i * i, size, i):
                    flags[j] = False
        return flags[2:].sum(), (counts * np.arange(counts.size)).sum()

    return sieve(60_000_000)


def of_networkx():
    import networkx

    graph = networkx.gnm_random_graph(60_000, 200_000, seed=1)
    lengths = networkx.single_source_shortest_path_length(graph, 0)
    parts = networkx.number_connected_components(graph)
    return sum(lengths.values()), parts, sum(networkx.core_number(graph).values())


def of_igraph():
    import random

    import igraph

    random.seed(1)
    graph = igraph.Graph.Erdos_Renyi(n=200_000, m=1_000_000)
    rank = graph.pagerank()
    return graph.ecount(), f"{max(rank):.9f}", max(graph.coreness()), len(graph.connected_components())


def of_jax():
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(x):
        return jnp.tanh(x @ x / 1200.0)

    x = jax.random.normal(jax.random.PRNGKey(1), (1200, 1200))
    for _ in range(8):
        x = step(x)
    y = jnp.sort(jax.random.randint(jax.random.PRNGKey(2), (8_000_000,), 0, 1 << 30))
    return f"{float(jnp.abs(x).sum()):.1f}", int(y[::1000].astype(jnp.int32)[5])


def of_torch():
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(2)
    model = torch.nn.Sequential(torch.nn.Linear(500, 1500), torch.nn.ReLU(), torch.nn.Linear(1500, 1))
    optimizer = torch.optim.Adam(model.parameters())
    points = torch.randn(8_000, 500)
    for begin in range(0, 8_000, 2000):
        batch = points[begin : begin + 2000]
        loss = (model(batch) - batch[:, :1]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return f"{loss.item():.4f}"


if __name__ == "__main__":
    print(globals()[f"of_{sys.argv[1]}"]())
