"""Four and more nodes: chunks and sums travel in another order there, and results stay right."""

import pytest
import torch
from lang.harness import as_cta

import mkernel as mk
from mkernel.lang.order import arrival_order
from mkernel.ops.all_gather_matmul.order import destination_at, forwarded_at
from mkernel.sim.scheduler import Options

CONFIG = mk.Config(tile_m=16, tile_n=16, tile_k=16, chunk_rows=8)
M, N, K = 20, 24, 16  # of a rank; three chunks, two row blocks


def operands(rank, size, turn):
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(M, K, generator=generator), torch.randn(K, N, generator=generator)


def all_gather(group, turn):
    a, b = operands(group.rank, group.size, turn)
    expected = torch.cat([operands(rank, group.size, turn)[0] for rank in range(group.size)]) @ b
    return mk.all_gather_matmul(a, b, config=CONFIG), expected


def weight_grad(group, turn):
    a, _ = operands(group.rank, group.size, turn)
    dy = torch.randn(group.size * M, N, generator=torch.Generator().manual_seed(turn))
    gathered = torch.cat([operands(rank, group.size, turn)[0] for rank in range(group.size)])
    return mk.all_gather_matmul_weight_grad(a, dy), gathered.t() @ dy


def reduce_scatter(group, turn):
    def of(rank):
        generator = torch.Generator().manual_seed(100 * turn + rank)
        rows = group.size * M
        return torch.randn(rows, K, generator=generator), torch.randn(K, N, generator=generator)

    total = sum(a @ b for a, b in map(of, range(group.size)))
    result = mk.matmul_reduce_scatter(*of(group.rank), config=mk.Config(tile_m=16, tile_n=16, tile_k=16))
    return result, total[group.rank * M : (group.rank + 1) * M]


@pytest.mark.parametrize("call", [all_gather, weight_grad, reduce_scatter])
@pytest.mark.parametrize(("shape_of_cluster", "seeds"), [
    ((4, 2), 1), ((5, 1), 1),
    pytest.param((4, 2), 20, marks=pytest.mark.thorough), pytest.param((4, 4), 2, marks=pytest.mark.thorough),
])  # fmt: skip
def test_results(call, shape_of_cluster, seeds):
    def on_rank(group):
        for turn in range(3):  # both halves, one of them twice
            result, expected = call(group, turn)
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        return True

    nodes, gpus = shape_of_cluster
    for seed in range(seeds):
        assert all(mk.spawn(on_rank, nodes=nodes, gpus_per_node=gpus, device="cpu", seed=seed, sim=Options(ctas=5)))


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8])
def test_every_chunk_goes_everywhere_once(nodes):
    chunks = 3
    with as_cta() as call:
        destinations = [call(destination_at, turn, NODES=nodes) for turn in range(1, nodes)]
        forwarded = [call(forwarded_at, item, chunks, NODES=nodes) for item in range(chunks * nodes)]
    assert sorted(destinations) == list(range(1, nodes))
    assert sorted(forwarded) == [(chunk, node) for chunk in range(chunks) for node in range(nodes)]
    assert forwarded[:chunks] == [(chunk, 0) for chunk in range(chunks)], "own chunks first"


@pytest.mark.parametrize("nodes", [4, 5, 8])
def test_chunks_are_sent_forwarded_and_computed_in_the_same_order(nodes):
    chunks = 3
    with as_cta() as call:
        # turn i of every rank brings this one a chunk of the rank so many nodes before it
        sent = [
            (chunk, (nodes - call(destination_at, turn, NODES=nodes)) % nodes)
            for chunk in range(chunks) for turn in range(1, nodes)
        ]  # fmt: skip
        forwarded = [call(forwarded_at, item, chunks, NODES=nodes) for item in range(chunks, chunks * nodes)]
        computed = [
            call(arrival_order, place, 0, chunks, WORLD_SIZE=nodes, RANKS_PER_NODE=1)
            for place in range(chunks, chunks * nodes)
        ]
    assert sent == forwarded == [(block, source) for source, block in computed]
