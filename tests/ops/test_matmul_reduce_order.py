"""Who takes which tile, and when: every tile once, and nobody waits for what comes later."""

import itertools

import pytest
from lang.harness import as_cta

from mkernel.ops.reduce.all_reduce import order as all_reduce
from mkernel.ops.reduce.reduce_scatter import order as reduce_scatter

CUTS = [(1, 1), (1, 6), (2, 3), (5, 2), (7, 6), (8, 6), (13, 4)]  # tiles, CTAs


@pytest.mark.parametrize(("tiles", "ctas"), CUTS)
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (4, 1), (4, 2), (5, 3)])
def test_reduce_scatter(nodes, gpus, tiles, ctas):
    size = nodes * gpus
    sequences = []
    for cta in range(ctas):
        with as_cta(cta, ctas) as call:
            rounds, early, late = call(reduce_scatter.deal_tiles, tiles, WORLD_SIZE=size)
            places = range(rounds * size + early + late)
            sequences.append(
                [
                    call(reduce_scatter.tile_at, place, tiles, rounds, early, WORLD_SIZE=size, RANKS_PER_NODE=gpus)
                    for place in places
                ]
            )
    taken = {item: (cta, place) for cta, sequence in enumerate(sequences) for place, item in enumerate(sequence)}
    everything = set(itertools.product(range(nodes), range(gpus), range(tiles)))
    assert set(taken) == everything
    assert sum(map(len, sequences)) == len(everything), "a tile was taken twice"
    # ranks do the same, relative to themselves: a tile for a rank so many behind is summed up there as its own
    for node_offset, rank_offset, tile in everything:
        if rank_offset:
            assert taken[node_offset, rank_offset, tile] < taken[node_offset, 0, tile], "pushed before it is added"
            assert taken[node_offset, rank_offset, tile][0] <= taken[node_offset, 0, tile][0], "by no later CTA"
        elif node_offset:
            assert taken[node_offset, 0, tile][0] <= taken[0, 0, tile][0], "sent by no later CTA"
            assert taken[node_offset, 0, tile] < taken[0, 0, tile], "sent before it is added"
    most = max(map(len, sequences))
    assert most <= -(-tiles // ctas) * size
    if tiles % ctas * size <= ctas:
        assert most == -(-tiles * size // ctas), "the last round is full, or the only one that is not"


@pytest.mark.parametrize(("nodes", "gpus"), [(4, 1), (4, 2), (6, 3)])
def test_with_many_nodes_sums_are_spread_over_the_launch(nodes, gpus):
    """With three nodes or fewer, a CTA sends the sums for all nodes one after the other."""
    with as_cta(0, 1) as call:
        rounds, early, _ = call(reduce_scatter.deal_tiles, 2, WORLD_SIZE=nodes * gpus)
        places = range(2 * (nodes - 1) * gpus)
        items = [
            call(reduce_scatter.tile_at, place, 2, rounds, early, WORLD_SIZE=nodes * gpus, RANKS_PER_NODE=gpus)
            for place in places
        ]
    sums = [place for place, (node, rank, _) in enumerate(items) if node and not rank]
    assert len(sums) == 2 * (nodes - 1)
    assert max(after - before for before, after in itertools.pairwise(sums)) <= 2 * gpus
    behind = [place - items.index((items[place][0], gpus - 1, items[place][2])) for place in sums] if gpus > 1 else []
    assert all(distance >= gpus or place == sums[len(sums) // 2 - 1] for distance, place in zip(behind[:-1], sums))


@pytest.mark.parametrize(("tiles", "ctas"), CUTS)
@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_all_reduce(gpus, tiles, ctas):
    found = []
    for cta in range(ctas):
        with as_cta(cta, ctas) as call:
            rounds = call(all_reduce.count_rounds, tiles)
            for local in range(gpus):
                items = [
                    call(all_reduce.round_at, place, rounds, local, RANKS_PER_NODE=gpus) for place in range(rounds)
                ]
                assert sorted(round for round, _ in items) == list(range(rounds))
                for place, (round, owner) in enumerate(items):
                    assert round // gpus == place // gpus, "blocks come one after the other"
                    assert call(all_reduce.round_of, round // gpus, owner, RANKS_PER_NODE=gpus) == round
                    if owner == local:
                        assert place + 1 == rounds or place % gpus == gpus - 1, "the own one last in its block"
                if local == 0:
                    found += [round * ctas + cta for round, _ in items]
    assert sorted(found) == list(range(tiles))
