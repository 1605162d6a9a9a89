"""Roles: every tile is computed exactly once, helpers take what was left for them and nothing else."""

import pytest
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mkernel.lang.roles import COMPUTE, INTRA, SEND, other_tiles_of, own_tiles_of

from .harness import as_cta


def own_tiles(cta: int, ctas: int, helpers: int, own: int, left: int) -> list[int]:
    with as_cta(cta, ctas) as call:
        return list(range(*call(own_tiles_of, cta, tl.constexpr(helpers), own, left)))


def other_tiles(cta: int, ctas: int, helpers: int, before: int, tiles: int) -> list[int]:
    with as_cta(cta, ctas) as call:
        return list(range(*call(other_tiles_of, cta, tl.constexpr(helpers), before, tiles)))


@st.composite
def launches(draw):
    ctas = draw(st.integers(1, 9))
    return ctas, draw(st.integers(0, ctas - 1))


@settings(max_examples=80, deadline=None)
@given(launch=launches(), own=st.integers(0, 40), left=st.integers(0, 40))
@example(launch=(1, 0), own=5, left=0)
@example(launch=(2, 1), own=5, left=5)  # all of them are left to the helper
@example(launch=(4, 3), own=2, left=2)  # fewer than helpers
@example(launch=(8, 3), own=3, left=1)  # fewer than CTAs
@example(launch=(8, 3), own=0, left=0)
def test_every_own_tile_is_computed_once(launch, own, left):
    ctas, helpers = launch
    left = min(left, own) if helpers else 0
    parts = [own_tiles(cta, ctas, helpers, own, left) for cta in range(ctas)]
    assert sorted(tile for part in parts for tile in part) == list(range(own))
    helped = sorted(tile for part in parts[:helpers] for tile in part)
    assert helped == list(range(own - left, own)), "the last ones are the helpers'"


@settings(max_examples=80, deadline=None)
@given(launch=launches(), before=st.integers(0, 40), tiles=st.integers(0, 40))
@example(launch=(1, 0), before=0, tiles=3)
@example(launch=(9, 8), before=7, tiles=3)
@example(launch=(9, 2), before=7, tiles=3)
@example(launch=(9, 2), before=14, tiles=0)
def test_every_other_tile_is_computed_once_and_not_by_helpers(launch, before, tiles):
    ctas, helpers = launch
    parts = [other_tiles(cta, ctas, helpers, before, tiles) for cta in range(ctas)]
    assert sorted(tile for part in parts for tile in part) == list(range(tiles))
    assert not any(parts[:helpers])


@settings(max_examples=60, deadline=None)
@given(launch=launches(), own=st.integers(0, 30), left=st.integers(0, 30), others=st.integers(0, 60))
@example(launch=(5, 2), own=7, left=2, others=11)
def test_both_parts_together_go_round_the_compute_ctas(launch, own, left, others):
    """The second part goes on with the CTA that is next, so that no CTA gets two tiles more than another."""
    ctas, helpers = launch
    left = min(left, own) if helpers else 0
    before = own - left
    for cta in range(helpers, ctas):
        first, second = own_tiles(cta, ctas, helpers, own, left), other_tiles(cta, ctas, helpers, before, others)
        mine = first + [before + tile for tile in second]
        assert mine == list(range(cta - helpers, before + others, ctas - helpers))


def test_helpers_share_what_was_left_evenly():
    assert [own_tiles(cta, 8, 3, 20, 7) for cta in range(3)] == [[13, 16, 19], [14, 17], [15, 18]]
    assert own_tiles(0, 8, 3, 20, 0) == []


@pytest.mark.parametrize("cta", range(6))
def test_a_cta_takes_its_tiles_in_rising_order(cta):
    for tiles in (own_tiles(cta, 6, 2, 50, 12), other_tiles(cta, 6, 2, 38, 100)):
        assert tiles == sorted(tiles)
        assert tiles or cta < 2


def test_many_tiles():
    own, others = 1 << 20, 7 << 20
    with as_cta(131, 132) as call:
        first, end, step = call(own_tiles_of, 131, tl.constexpr(3), own, 1000)
        assert (first, end, step) == (128, own - 1000, 129)
        first, end, step = call(other_tiles_of, 131, tl.constexpr(3), own - 1000, others)
        assert (own - 1000 + first) % 129 == 128
        assert (end, step) == (others, 129)


def test_roles_differ():
    assert len({SEND.value, INTRA.value, COMPUTE.value}) == 3
