"""Four and more nodes: chunks, sums and tiles come in another order there, and results stay right."""

import math

import pytest
import torch
from lang.harness import as_cta

import mkernel as mk
from mkernel import operators
from mkernel.lang.order import arrival_order
from mkernel.ops.all_gather_matmul.order import destination_at, forwarded_at
from mkernel.ops.moe.plan import PLACE_RATE
from mkernel.runtime.world import Links
from mkernel.scale.cluster import member, plan_of
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
@pytest.mark.parametrize("cluster", [(4, 2), (5, 1)])
def test_results(call, cluster):
    def on_rank(group):
        for turn in range(3):  # both halves, one of them twice
            result, expected = call(group, turn)
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        return True

    nodes, gpus = cluster
    assert all(mk.spawn(on_rank, nodes=nodes, gpus_per_node=gpus, device="cpu", seed=0, sim=Options(ctas=5)))


def planned(op, shape, nodes, **options):
    with member(nodes, 8, 0, ctas=132, capability=90, links=Links()) as group:
        return plan_of(group, operators.find(op), shape, torch.bfloat16, options, None)


def test_plans_change_on_many_nodes():
    """Tiles of attention one by one where pairs would leave CTAs idle, and CTAs for tokens that make more rows."""
    reasons = [
        str(planned("ring_attention", (1, 32, 65536 * nodes, 128), nodes, causal=False)).count("one by one")
        for nodes in (1, 2, 3, 4, 16)
    ]
    assert reasons == [0, 0, 0, 1, 1]
    assert "one by one" not in str(planned("ring_attention", (1, 32, 4 * 262144, 128), 4, causal=False)), "long units"
    nodes = (2, 4, 16, 64)
    far = [planned("moe_dispatch_matmul", (16384 * i, 2048, 7168), i).copying.far_intra_ctas for i in nodes]
    needed = [math.ceil(1.5 * 50e9 * 8 / PLACE_RATE / i) for i in nodes]  # if all tokens were needed on every rank
    assert far[0] == needed[0]
    assert far[1] >= needed[1]
    assert far[2] > 2 * needed[2]
    assert far[3] >= 4 * needed[3]


@pytest.mark.parametrize(("op", "shape", "fewest", "reason"), [
    ("all_gather_matmul", (16384, 2048, 8192), 4, "nobody waits for the last chunk of a node"),
    ("matmul_reduce_scatter", (16384, 8192, 8192), 4, "so that requests spread over the launch"),
    ("matmul_all_reduce", (16384, 8192, 8192), 3, "as little as possible crosses the network"),
    ("moe_dispatch", (8192, 7168), 4, "of them, and makes more rows on each"),
    ("moe_dispatch_matmul", (8192, 2048, 7168), 4, "of them, and makes more rows on each"),
    ("moe_ffn", (8192, 2048, 7168), 4, "of them, and makes more rows on each"),
])  # fmt: skip
def test_plans_say_why(op, shape, fewest, reason):
    for nodes in range(1, 6):
        sizes = tuple(
            size * nodes if name in operators.find(op).shared else size
            for name, size in zip(operators.find(op).dimensions, shape)
        )
        assert (reason in str(planned(op, sizes, nodes))) == (nodes >= fewest)


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
