"""Graph analytics, for record.sh: pagerank.py VERTEX_BITS EDGES PASSES.

A generated graph is loaded into adjacency arrays; then PageRank goes over all of it, again and again. Few vertices
have most edges: each bit of an edge's target is set with a probability of a quarter, as in a Kronecker graph, and the
numbers of edges that leave the vertices are Pareto-distributed.
"""
import random
import sys
from array import array

DAMPING = 0.85

bits, edges, passes = (int(argument) for argument in sys.argv[1:])
vertices = 1 << bits
rng = random.Random(1)
# Of Pareto's distribution with this exponent the mean is three times the least.
least = edges / vertices / 3
degrees = [round(least * rng.paretovariate(1.5)) for _ in range(vertices)]
mask = int.from_bytes(array("Q", [vertices - 1]).tobytes() * max(degrees), "little")


def targets(count):
    size = 8 * count
    drawn = rng.getrandbits(8 * size) & rng.getrandbits(8 * size) & mask
    return array("Q", drawn.to_bytes(size, "little"))


graph = [targets(degree) for degree in degrees]

ranks = array("d", [1 / vertices]) * vertices
for _ in range(passes):
    following = array("d", [(1 - DAMPING) / vertices]) * vertices
    for vertex, rank in enumerate(ranks):
        neighbours = graph[vertex]
        if neighbours:
            share = DAMPING * rank / len(neighbours)
            for neighbour in neighbours:
                following[neighbour] += share
    ranks = following
print("%d edges, highest rank %.2e" % (sum(degrees), max(ranks)))
