"""Roles: every tile is computed exactly once, whoever helps and whenever they join."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mkernel.lang.roles import COMPUTE, INTRA, SEND, first_round, rounds_before, tile_in_round, worker_of

from .harness import as_cta


def tiles_of(cta: int, ctas: int, helpers: int, join_round: int, before: int, start: int | None = None) -> list[int]:
    """Tiles below `before` that a CTA computes, from its first round on or from round `start`."""
    with as_cta(cta, ctas) as call:
        worker = call(worker_of, cta, helpers)
        first = call(first_round, cta, helpers, join_round) if start is None else start
        last = call(rounds_before, before, cta, helpers, join_round)
        return [call(tile_in_round, round, worker, helpers, join_round) for round in range(first, last)]


@st.composite
def launches(draw):
    ctas = draw(st.integers(1, 9))
    helpers = draw(st.integers(0, ctas))
    join_round = 0 if helpers == ctas else draw(st.integers(0, 5))
    return ctas, helpers, join_round


@settings(max_examples=80, deadline=None)
@given(launch=launches(), tiles=st.integers(0, 50))
@example(launch=(4, 4, 0), tiles=17)  # all CTAs help, nobody waits for them
@example(launch=(4, 4, 0), tiles=0)
@example(launch=(1, 1, 0), tiles=5)
@example(launch=(1, 0, 0), tiles=5)
@example(launch=(8, 3, 2), tiles=3)  # fewer tiles than CTAs
@example(launch=(8, 3, 2), tiles=0)
@example(launch=(8, 3, 2), tiles=10)  # exactly the rounds without helpers
@example(launch=(8, 3, 2), tiles=11)
@example(launch=(8, 3, 100), tiles=40)  # helpers never come
def test_every_tile_is_computed_once(launch, tiles):
    ctas, helpers, join_round = launch
    done = [tile for cta in range(ctas) for tile in tiles_of(cta, ctas, helpers, join_round, tiles)]
    assert sorted(done) == list(range(tiles))


@settings(max_examples=60, deadline=None)
@given(launch=launches(), tiles=st.integers(0, 40), own=st.integers(0, 40))
@example(launch=(3, 3, 0), tiles=9, own=3)
@example(launch=(5, 2, 2), tiles=20, own=6)  # the first part ends with the last round without helpers
@example(launch=(5, 2, 2), tiles=20, own=7)
@example(launch=(5, 2, 3), tiles=4, own=2)
def test_two_parts_of_a_launch_are_cut_cleanly(launch, tiles, own):
    """As in all_gather_matmul: own tiles first, then the others, from the round where the CTA was."""
    ctas, helpers, join_round = launch
    own = min(own, tiles)
    done = []
    for cta in range(ctas):
        first_part = tiles_of(cta, ctas, helpers, join_round, own)
        with as_cta(cta, ctas) as call:
            first = call(first_round, cta, helpers, join_round)
            middle = max(call(rounds_before, own, cta, helpers, join_round), first)
        second_part = tiles_of(cta, ctas, helpers, join_round, tiles, start=middle)
        assert all(tile < own for tile in first_part)
        assert all(tile >= own for tile in second_part)
        done += first_part + second_part
    assert sorted(done) == list(range(tiles))


@settings(max_examples=40, deadline=None)
@given(launch=launches(), tile=st.integers(0, 40))
def test_rounds_before_counts_exactly_the_rounds_with_lower_tiles(launch, tile):
    ctas, helpers, join_round = launch
    for cta in range(ctas):
        with as_cta(cta, ctas) as call:
            worker = call(worker_of, cta, helpers)
            first = call(first_round, cta, helpers, join_round)
            before = call(rounds_before, tile, cta, helpers, join_round)
            assert before >= first
            # tiles rise from round to round, so it is enough to look at both sides of the cut
            if before > first:
                assert call(tile_in_round, before - 1, worker, helpers, join_round) < tile
            assert call(tile_in_round, before, worker, helpers, join_round) >= tile


@pytest.mark.parametrize("helpers", [0, 1, 3, 8])
def test_workers_are_numbered_compute_first(helpers):
    ctas = 8
    workers = []
    for cta in range(ctas):
        with as_cta(cta, ctas) as call:
            workers.append(call(worker_of, cta, helpers))
    assert sorted(workers) == list(range(ctas))
    assert workers[helpers:] == list(range(ctas - helpers))


@pytest.mark.parametrize("join_round", [0, 1, 4])
def test_helpers_start_in_the_join_round_and_others_at_once(join_round):
    with as_cta(0, 6) as call:
        assert [call(first_round, cta, 2, join_round) for cta in range(6)] == [join_round] * 2 + [0] * 4


def test_helpers_get_no_tile_when_they_would_come_too_late():
    assert tiles_of(0, 4, 1, 3, 9) == []
    assert tiles_of(0, 4, 1, 3, 12) == []
    assert tiles_of(0, 4, 1, 3, 13) == [12]


def test_a_cta_takes_its_tiles_in_rising_order():
    for cta in range(7):
        tiles = tiles_of(cta, 7, 3, 2, 60)
        assert tiles == sorted(tiles)
        assert len(tiles) > 5


def test_roles_differ():
    assert len({SEND.value, INTRA.value, COMPUTE.value}) == 3
