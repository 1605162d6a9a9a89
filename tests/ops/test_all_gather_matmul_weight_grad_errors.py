"""What all_gather_matmul_weight_grad refuses, in which words; then what its plans decide."""

from __future__ import annotations

import pytest
import torch
from support.operator_calls import run
from support.weight_grad_reference import Case, call

import mkernel as mk
from mkernel.ops.all_gather_matmul.weight_grad.plan import Problem, _estimate, _search

OP = "all_gather_matmul_weight_grad"
GOOD = Case(5, 6, 8)


def zeros(*shape, dtype=torch.float32, **options):
    return torch.zeros(shape, dtype=dtype, **options)


def refused(make, *words, cluster=(1, 2), op=mk.all_gather_matmul_weight_grad):
    """`make(group)` gives the arguments of a call that every rank is refused, with these words."""

    def work(group):
        args, kwargs = make(group)
        before = group.heap.nbytes
        with pytest.raises(mk.ArgumentError) as caught:
            op(*args, **kwargs)
        assert group.heap.nbytes == before
        for word in words:
            assert word in str(caught.value)
        call(group, GOOD)

    run(work, cluster=cluster)


REFUSED = {
    "a is no tensor": (([[1.0]], zeros(2, 1)), {}, ["a must be a torch.Tensor", "list"]),
    "dy is no tensor": ((zeros(1, 1), None), {}, ["dy must be a torch.Tensor", "NoneType"]),
    "a has 1 dimension": ((zeros(4), zeros(8, 4)), {}, ["a must have 2 dimensions", "(4,)"]),
    "dy has 3 dimensions": ((zeros(4, 4), zeros(8, 4, 1)), {}, ["dy must have 2 dimensions", "(8, 4, 1)"]),
    "dy elsewhere": ((zeros(4, 4), zeros(8, 4, device="meta")), {}, ["dy is on meta", "this rank's device is cpu"]),
    "float64": (
        (zeros(4, 4, dtype=torch.float64), zeros(8, 4, dtype=torch.float64)),
        {},
        ["a has dtype torch.float64", "torch.bfloat16", "torch.float16", "torch.float32"],
    ),
    "two dtypes": (
        (zeros(4, 4), zeros(8, 4, dtype=torch.float16)),
        {},
        ["dy has dtype torch.float16", "a has torch.float32", "the same"],
    ),
    "dy has the rows of one rank": (
        (zeros(4, 5), zeros(4, 3)),
        {},
        ["a is (4, 5)", "dy is (4, 3)", "a row for each of the 8 gathered rows", "4 from each of 2 ranks"],
    ),
    "out is the transpose": (
        (zeros(4, 5), zeros(8, 3)),
        {"out": zeros(3, 5)},
        ["out has shape (3, 5)", "the result has (5, 3)", "k, n"],
    ),
    "out of another dtype": (
        (zeros(4, 5), zeros(8, 3)),
        {"out": zeros(5, 3, dtype=torch.bfloat16)},
        ["out has dtype torch.bfloat16", "torch.float32"],
    ),
    "chunks that are no multiple of a step": (
        (zeros(40, 5), zeros(80, 3)),
        {"config": mk.Config(tile_k=16, chunk_rows=24)},
        ["config.chunk_rows is 24", "multiple or a divisor of tile_k, 16"],
    ),
    "no pass": ((zeros(4, 5), zeros(8, 3)), {"config": mk.Config(passes=0)}, ["config.passes", "from 1 to", "got 0"]),
    "no held tile": (
        (zeros(4, 5), zeros(8, 3)),
        {"config": mk.Config(held_tiles=0)},
        ["config.held_tiles", "from 1 to", "got 0"],
    ),
    "nobody copies": ((zeros(4, 5), zeros(8, 3)), {"config": mk.Config(intra_ctas=0)}, ["config.intra_ctas", "1"]),
    "nobody computes": ((zeros(4, 5), zeros(8, 3)), {"config": mk.Config(ctas=1)}, ["config.ctas is 1", "at least 3"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    args, kwargs, words = REFUSED[name]
    refused(lambda group: (args, kwargs), *words)


@pytest.mark.parametrize("name", REFUSED)
def test_explain_refuses_the_same(name):
    args, kwargs, words = REFUSED[name]
    refused(lambda group: (args, kwargs), *words, op=lambda *args, **kwargs: mk.explain(OP, *args, **kwargs))


@pytest.mark.parametrize("name", ["a", "dy", "out"])
def test_gradients_are_refused(name):
    def make(group):
        tensors = {"a": zeros(4, 5), "dy": zeros(8, 3), "out": zeros(5, 3)}
        tensors[name].requires_grad_()
        return (tensors["a"], tensors["dy"]), {"out": tensors["out"]}

    refused(make, f"{name} requires grad", "torch.no_grad()", f"{name}.detach()")


@pytest.mark.parametrize("name", ["a", "dy"])
def test_an_out_that_overlaps(name):
    def make(group):
        memory = zeros(64)
        tensors = {"a": zeros(4, 5), "dy": zeros(8, 3)}
        tensors[name] = memory[: tensors[name].numel()].view(tensors[name].shape)
        return (tensors["a"], tensors["dy"]), {"out": memory[4:19].view(5, 3)}

    refused(make, f"out overlaps {name}")


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        (lambda rank: (zeros(4 + rank, 5), zeros(2 * (4 + rank), 3)), ["m=4", "m=5"]),
        (lambda rank: (zeros(4, 5 + rank), zeros(8, 3)), ["k=5", "k=6"]),
    ],
)
def test_ranks_that_call_differently(differs, words):
    refused(lambda group: (differs(group.rank), {}), "pass the same values", *words)


def test_ranks_with_other_chunks():
    def make(group):
        config = mk.Config(tile_k=16, chunk_rows=16 * (1 + group.rank))
        return (zeros(40, 5), zeros(80, 3)), {"config": config}

    refused(make, "pass the same values", "chunk_rows=16", "chunk_rows=32")


# -- plans


def explained(*shapes, cluster=(1, 4), config=None, **options):
    m, n, k = shapes

    def work(group):
        return mk.explain(OP, zeros(m, k), zeros(group.size * m, n), config=config, **options)

    return run(work, cluster=cluster)[0]


def test_a_plan_says_what_it_does():
    text = str(explained(40, 20, 24, config=mk.Config(tile_k=16, chunk_rows=16)))
    assert text.startswith(f"{OP}: tiles 32x32x16, ")
    assert "3 chunks of 16 rows per rank; each CTA computes its first 2 tiles in 3 passes" in text
    assert "the last rows are estimated to arrive after" in text


def test_there_are_no_more_passes_than_chunks():
    plan = explained(5, 20, 24, cluster=(1, 2), config=mk.Config(passes=9))
    assert (plan.chunks, plan.config.passes) == (1, 2)
    assert explained(5, 20, 24, cluster=(1, 1), config=mk.Config(passes=9)).config.passes == 1


# seconds of 512 tiles of 128 x 256 x 16384 on an H200, and of 201 MB that 4 ranks push to each other
REAL = Problem(4, 512, 128 * 256, 176e-6, 7e-6, 201_326_592, 33e9, 450e9, 0.0)


def test_passes_overlap_more_than_one_wave_of_tiles():
    """The reason for passes: in one, only what a CTA does before its first tile is complete overlaps with arrivals."""
    one = min((_estimate(REAL, 132, 0, copiers, 1, 1) for copiers in range(1, 20)), key=lambda s: s.seconds)
    best = _search(REAL, 132, 0, True, None)
    assert best.passes > 1
    assert best.held > 1
    assert best.seconds < 0.8 * one.seconds
    assert best.seconds >= 512 / 132 * 176e-6  # not faster than the multiplication alone


def test_a_configuration_limits_the_search():
    found = _search(REAL, 132, 0, True, mk.Config(passes=2, held_tiles=3, intra_ctas=5))
    assert (found.passes, found.held, found.copiers) == (2, 3, 5)
    for beyond in (mk.Config(passes=60), mk.Config(held_tiles=1000), mk.Config(intra_ctas=100)):
        assert _search(REAL, 132, 0, True, beyond).seconds > 0
    # with one rank per node, nobody copies, whatever the number
    assert _search(REAL, 132, 1, False, mk.Config(intra_ctas=2)).copiers == 0


def test_a_rank_alone_computes_in_one_pass():
    alone = Problem(1, 512, 128 * 256, 176e-6, 7e-6, 0, 33e9, 450e9, 0.0)
    assert _search(alone, 132, 0, False, None).passes == 1
