"""Who sees whom, against plain Python; the online softmax on rows that see nothing."""

import pytest
import torch
import triton
import triton.language as tl
from lang.harness import as_cta, launch, simulate, workspace_of

from mkernel.ops.attention.mask import Mask, Visible, key_blocks, keys_below, position_of
from mkernel.ops.attention.protocol import Rounds, chunk_at, slot_of
from mkernel.ops.attention.sequences import Pattern, Sequences
from mkernel.ops.attention.softmax import normalize, online_softmax_step
from mkernel.runtime.operands import constants


def mask_of(sequences):
    """The same, as a kernel is told."""
    return Mask(sequences.length, None, *constants(sequences.size, sequences.zigzag, True, False))


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize(("size", "length"), [(1, 6), (2, 4), (3, 2), (3, 10)])
def test_positions(size, length, zigzag):
    sequences = Sequences(size, length, Pattern(True, "zigzag" if zigzag else "contiguous"))
    mask = mask_of(sequences)
    places = [sequences.positions(rank).tolist() for rank in range(size)]
    assert sorted(place for rank in places for place in rank) == list(range(size * length))
    with as_cta() as call:
        for rank in range(size):
            mine = [call(position_of, mask, rank, i) for i in range(length)]
            assert mine == places[rank] == sorted(mine)
            for position in range(-1, size * length + 2):
                below = sum(place < position for place in mine)
                assert call(keys_below, mask, position, rank) == below
                assert sequences.keys_below(position, rank) == below


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("documents", [None, (0, 5, 20, 36)])
@pytest.mark.parametrize("window", [None, (3, None), (0, None), (14, 2)])
def test_key_blocks_hold_what_is_seen(zigzag, documents, window):
    """Every block in which a row of the tile sees a key, and no other; those that all rows see whole apart. Between the
    two pieces of a zigzag there may be others, which no row of a tile with rows of both sees."""
    size, length, tile_m, tile_n = 3, 12, 4, 4
    sequences = Sequences(size, length, Pattern(True, "zigzag" if zigzag else "contiguous", documents, window))
    with as_cta() as call:
        for rank in range(size):
            starts, ends = sequences.seen(rank)
            for row in range(0, length, tile_m):
                last = row + tile_m - 1
                visible = Visible(*(int(x) for x in (starts[row], ends[row], starts[last], ends[last])))
                for source in range(size):
                    keys = sequences.positions(source)
                    seen = [[starts[i] <= key < ends[i] for key in keys] for i in range(row, last + 1)]
                    first, full, full_end, end = call(
                        key_blocks, mask_of(sequences), visible, source, 0, length, TILE_N=tile_n
                    )
                    assert 0 <= first <= full <= full_end <= end
                    for block in range(length // tile_n):
                        part = [line[block * tile_n : (block + 1) * tile_n] for line in seen]
                        if any(map(any, part)):
                            assert first <= block < end
                        if full <= block < full_end:
                            assert all(map(all, part))
                        elif first <= block < end and documents is None and (window is None or not zigzag):
                            assert any(map(any, part))
                            assert not all(map(all, part))


def test_slots_and_chunks():
    with as_cta() as call:
        for rank in range(5):
            others = [call(slot_of, source, rank, WORLD_SIZE=5) for source in range(5) if source != rank]
            assert sorted(others) == [0, 1, 2, 3]
            assert call(slot_of, rank, rank, WORLD_SIZE=5) == 4
        # 70 keys in parts of 48, chunks of 32, padded to 80
        sizes = dict(parts=2, part_rows=48, padded=80, chunk_rows=32)
        rounds = Rounds(**dict.fromkeys(Rounds._fields, 0) | sizes)
        chunks = [[call(chunk_at, rounds, round_index, 3, index) for index in range(2)] for round_index in (4, 5)]
        assert [[chunk[4:] for chunk in panel] for panel in chunks] == [[(0, 32), (32, 16)], [(48, 32), (80, 0)]]


@triton.jit
def _softmax(context, scores, values, out, lse, N: tl.constexpr):
    """Rows of N scores, half of them at a time."""
    i = tl.arange(0, 16)
    j = tl.arange(0, N // 2)
    row_max = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    accumulator = tl.zeros((16, 16), tl.float32)
    for half in range(2):
        block = tl.load(scores + i[:, None] * N + half * (N // 2) + j[None, :])
        weights, total, row_max, alpha = online_softmax_step(block, total, row_max, 1.4426950408889634)
        value = tl.load(values + (half * (N // 2) + j[:, None]) * 16 + i[None, :])
        accumulator = tl.dot(weights, value, accumulator * alpha[:, None])
    result, logarithm = normalize(accumulator, total, row_max)
    tl.store(out + i[:, None] * 16 + i[None, :], result)
    tl.store(lse + i, logarithm)


def test_rows_that_see_nothing_give_zeros():
    """Row 0 sees nothing, row 1 nothing in its first half, row 2 nothing in its second, row 3 one key."""
    scores, values = 3 * torch.randn(16, 64), torch.randn(64, 16)
    scores[0] = scores[1, :32] = scores[2, 32:] = scores[3, 1:] = -torch.inf
    out, lse = torch.full((16, 16), torch.nan), torch.full((16,), torch.nan)

    def work(group):
        launch(group, workspace_of(group), _softmax, scores=scores, values=values, out=out, lse=lse, N=64)

    simulate(work)
    assert (out[0] == 0).all()
    assert lse[0] == -torch.inf
    exact = torch.softmax(scores[1:].double(), -1) @ values.double()
    assert torch.allclose(out[1:].double(), exact, atol=1e-5)
    assert torch.allclose(lse[1:].double(), scores[1:].double().logsumexp(-1), atol=1e-5)
