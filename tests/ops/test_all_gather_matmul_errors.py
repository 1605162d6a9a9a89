"""What all_gather_matmul refuses, in which words, and that a refused call leaves the group usable."""

from __future__ import annotations

import pytest
import torch
from support.operator_calls import Case, call, run

import mkernel as mk

GOOD = Case(5, 6, 8)


def zeros(*shape, dtype=torch.float32, **options):
    return torch.zeros(shape, dtype=dtype, **options)


def refused(make, *words, error=mk.ArgumentError, cluster=(1, 2), op=mk.all_gather_matmul):
    """`make(group)` gives the arguments of a call that every rank is refused, with these words."""

    def work(group):
        args, kwargs = make(group)
        before = group.heap.nbytes
        with pytest.raises(error) as caught:
            op(*args, **kwargs)
        assert type(caught.value) is error
        assert group.heap.nbytes == before
        for word in words:
            assert word in str(caught.value)
        call(group, GOOD)

    run(work, cluster=cluster)


class Shell(torch.Tensor):
    """A tensor around others, as a DTensor is."""

    @staticmethod
    def __new__(cls, *shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, *_):
        raise NotImplementedError


REFUSED_TENSORS = {
    "a is sparse": ((zeros(4, 4).to_sparse(), zeros(4, 4)), {}, ["a has the layout torch.sparse_coo", "to_dense()"]),
    "b is a shell": ((zeros(4, 4), Shell(4, 4)), {}, ["b is a Shell", "of a DTensor b.to_local()"]),
    "a list of shells": ((zeros(4, 4), [Shell(4, 4), Shell(4, 4)]), {}, ["b is a Shell", "of a DTensor b.to_local()"]),
    "a is negated": ((zeros(4, 4, dtype=torch.complex64).conj().imag, zeros(4, 4)), {}, ["pass a.resolve_neg()"]),
    "a is no tensor": (([[1.0]], zeros(1, 1)), {}, ["a must be a torch.Tensor", "list"]),
    "b is no tensor": ((zeros(1, 1), None), {}, ["b must be a torch.Tensor", "NoneType"]),
    "out is no tensor": ((zeros(1, 1), zeros(1, 1)), {"out": 3}, ["out must be a torch.Tensor", "int"]),
    "a has 1 dimension": ((zeros(4), zeros(4, 4)), {}, ["a must have at least 2 dimensions", "(4,)"]),
    "b has 3 dimensions": ((zeros(4, 4), zeros(4, 4, 1)), {}, ["b must have 2 dimensions", "(4, 4, 1)"]),
    "a has more than b": ((zeros(2, 4, 4), zeros(4)), {}, ["b must have 2 dimensions", "(4,)"]),
    "out has 0 dimensions": ((zeros(4, 4), zeros(4, 4)), {"out": zeros()}, ["out must have 2 dimensions", "()"]),
    "a elsewhere": ((zeros(4, 4, device="meta"), zeros(4, 4)), {}, ["a is on meta", "this rank's device is cpu"]),
    "b elsewhere": ((zeros(4, 4), zeros(4, 4, device="meta")), {}, ["b is on meta", "this rank's device is cpu"]),
    "out elsewhere": ((zeros(4, 4), zeros(4, 4)), {"out": zeros(8, 4, device="meta")}, ["out is on meta", "cpu"]),
    "float64": (
        (zeros(4, 4, dtype=torch.float64), zeros(4, 4, dtype=torch.float64)),
        {},
        ["a has dtype torch.float64", "torch.bfloat16", "torch.float16", "torch.float32"],
    ),
    "int32": ((zeros(4, 4, dtype=torch.int32), zeros(4, 4, dtype=torch.int32)), {}, ["a has dtype torch.int32"]),
    "two dtypes": (
        (zeros(4, 4), zeros(4, 4, dtype=torch.float16)),
        {},
        ["b has dtype torch.float16", "a has torch.float32", "the same"],
    ),
    "k differs": ((zeros(4, 5), zeros(6, 4)), {}, ["(4, 5)", "(6, 4)", "a's columns (5)", "b's rows (6)"]),
    "k differs, one is 0": ((zeros(4, 0), zeros(6, 4)), {}, ["a's columns (0)", "b's rows (6)"]),
    "out too low": (
        (zeros(4, 5), zeros(5, 3)),
        {"out": zeros(4, 3)},
        ["out has shape (4, 3)", "the result has (8, 3)", "world*m"],
    ),
    "out too wide": ((zeros(4, 5), zeros(5, 3)), {"out": zeros(8, 4)}, ["out has shape (8, 4)", "(8, 3)"]),
    "out of another dtype": (
        (zeros(4, 5), zeros(5, 3)),
        {"out": zeros(8, 3, dtype=torch.bfloat16)},
        ["out has dtype torch.bfloat16", "torch.float32"],
    ),
    "out of expanded rows": (
        (zeros(4, 5), zeros(5, 3)),
        {"out": zeros(1, 3).expand(8, 3)},
        ["out is an expanded tensor", "share one place"],
    ),
    "out of expanded columns": (
        (zeros(4, 5), zeros(5, 3)),
        {"out": zeros(8, 1).expand(8, 3)},
        ["out is an expanded tensor", "share one place"],
    ),
}


@pytest.mark.parametrize("name", REFUSED_TENSORS)
def test_tensors(name):
    args, kwargs, words = REFUSED_TENSORS[name]
    refused(lambda group: (args, kwargs), *words)


@pytest.mark.parametrize("name", REFUSED_TENSORS)
def test_explain_refuses_the_same(name):
    args, kwargs, words = REFUSED_TENSORS[name]

    def explain(*args, **kwargs):
        return mk.explain("all_gather_matmul", *args, **kwargs)

    refused(lambda group: (args, kwargs), *words, op=explain)


def test_errors_are_value_errors():
    assert issubclass(mk.ArgumentError, ValueError)
    assert issubclass(mk.ArgumentError, mk.MKernelError)
    assert issubclass(mk.CommTimeout, RuntimeError)


# -- gradients


@pytest.mark.parametrize("name", ["a", "b", "out"])
def test_out_has_no_gradient(name):
    def make(group):
        tensors = {"a": zeros(4, 5), "b": zeros(5, 3), "out": zeros(8, 3)}
        tensors[name].requires_grad_()
        return (tensors["a"], tensors["b"]), {"out": tensors["out"]}

    refused(make, "out cannot be combined with tensors that require grad", "torch.no_grad()")


def test_gradients_do_not_matter_under_no_grad():
    def work(group):
        a, b = GOOD.rows(group.rank).requires_grad_(), GOOD.weights(group.rank).requires_grad_()
        with torch.no_grad():
            y = call(group, GOOD, a=a, b=b)
        assert not y.requires_grad
        call(group, GOOD, a=a.detach(), b=b.detach())

    run(work)


# -- configurations

REFUSED_CONFIGS = {
    "tile_m is no power of two": (mk.Config(tile_m=24), ["config.tile_m", "power of two", "24"]),
    "tile_n is too small": (mk.Config(tile_n=8), ["config.tile_n", "from 16 to", "8"]),
    "tile_k is 0": (mk.Config(tile_k=0), ["config.tile_k", "from 16 to", "0"]),
    "tile_k is negative": (mk.Config(tile_k=-16), ["config.tile_k", "whole number", "-16"]),
    "copy_bytes is no power of two": (mk.Config(copy_bytes=100), ["config.copy_bytes", "power of two", "100"]),
    "copy_bytes is too small": (mk.Config(copy_bytes=32), ["config.copy_bytes", "from 64 to", "32"]),
    "group_m is 0": (mk.Config(group_m=0), ["config.group_m", "from 1 to", "0"]),
    "stages is 0": (mk.Config(stages=0), ["config.stages", "from 1 to"]),
    "warps is 0": (mk.Config(warps=0), ["config.warps", "from 1 to"]),
    "chunk_rows is 0": (mk.Config(chunk_rows=0), ["config.chunk_rows"]),
    "chunk_rows is no whole number": (mk.Config(chunk_rows=2.5), ["config.chunk_rows", "whole number", "2.5"]),
    "tile_m is a word": (mk.Config(tile_m="large"), ["config.tile_m", "whole number", "'large'"]),
    "tile_m is a fraction": (mk.Config(tile_m=16.0), ["config.tile_m", "whole number", "16.0"]),
    "tile_n is 0": (mk.Config(tile_n=0), ["config.tile_n", "from 16 to"]),
    "ctas is negative": (mk.Config(ctas=-1), ["config.ctas", "-1"]),
    "join_tiles is negative": (mk.Config(join_tiles=-1), ["config.join_tiles", "whole number", "-1"]),
    "no intra": (mk.Config(intra_ctas=0), ["config.intra_ctas", "at least 1"]),
    "no send": (mk.Config(send_ctas=0), ["config.send_ctas", "at least 1"]),
    "too few CTAs": (mk.Config(ctas=2), ["config.ctas is 2", "at least 3", "send_ctas + intra_ctas"]),
    "too many CTAs": (mk.Config(ctas=7), ["config.ctas is 7", "only 6 CTAs", "resident"]),
    "too many helpers": (mk.Config(intra_ctas=4, send_ctas=4), ["config.ctas", "at least 9"]),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_config(name):
    config, words = REFUSED_CONFIGS[name]
    refused(lambda group: ((zeros(4, 5), zeros(5, 3)), {"config": config}), *words, cluster=(2, 2))


def test_config_of_another_type():
    refused(lambda group: ((zeros(4, 5), zeros(5, 3)), {"config": {"tile_m": 16}}), "config", "mk.Config", "dict")


@pytest.mark.parametrize(("cluster", "config"), [((1, 2), mk.Config(send_ctas=0)), ((2, 1), mk.Config(intra_ctas=0))])
def test_no_helpers_where_none_are_needed(cluster, config):
    """One node needs no send, one rank in a node needs no intra."""
    run(lambda group: call(group, GOOD, config=config), cluster=cluster)


def test_send_is_needed_to_stage_strided_rows():
    a, b = zeros(4, 10)[:, ::2], zeros(5, 3)
    refused(lambda group: ((a, b), {"config": mk.Config(send_ctas=0)}), "config.send_ctas", "at least 1")


# -- ranks that do not agree

DISAGREEING = {
    "m": ([zeros(4, 5), zeros(6, 5)], [zeros(5, 3)] * 2, [None, None], ["m=4", "m=6"]),
    "k": ([zeros(4, 5), zeros(4, 7)], [zeros(5, 3), zeros(7, 3)], [None, None], ["k=5", "k=7"]),
    "dtype": (
        [zeros(4, 5), zeros(4, 5, dtype=torch.float16)],
        [zeros(5, 3), zeros(5, 3, dtype=torch.float16)],
        [None, None],
        ["torch.float32", "torch.float16"],
    ),
    "chunk_rows": (
        [zeros(4, 5)] * 2,
        [zeros(5, 3)] * 2,
        [mk.Config(chunk_rows=1), mk.Config(chunk_rows=2)],
        ["chunk_rows=1", "chunk_rows=2"],
    ),
}


@pytest.mark.parametrize("name", DISAGREEING)
def test_ranks_must_agree(name):
    a, b, configs, words = DISAGREEING[name]

    def make(group):
        odd = int(group.rank == 1)
        return (a[odd], b[odd]), {"config": configs[odd]}

    refused(make, "all ranks of the group must pass the same values", "rank 1 has", *words, cluster=(1, 3))


def test_a_rank_with_an_empty_input_alone():
    """m = 0 on one rank only: an error, in words, and no wrong answer."""

    def work(group):
        with pytest.raises((mk.ArgumentError, mk.CommTimeout)) as caught:
            mk.all_gather_matmul(zeros(0 if group.rank == 0 else 4, 5), zeros(5, 3))
        return str(caught.value)

    for message in run(work, cluster=(1, 2)):
        assert "all_gather_matmul" in message


# -- groups


def test_no_group():
    with pytest.raises(mk.MKernelError, match="there is no group yet") as caught:
        mk.all_gather_matmul(zeros(4, 5), zeros(5, 3))
    assert "mk.init()" in str(caught.value)
    assert "mk.spawn" in str(caught.value)


@pytest.mark.parametrize("group", ["world", 0, object()])
def test_group_of_another_type(group):
    refused(
        lambda _: ((zeros(4, 5), zeros(5, 3)), {"group": group}), "group must be a mk.Group", type(group).__name__
    )  # fmt: skip


def test_a_closed_group():
    def work(group):
        part = group.split(0)
        call(part, GOOD)
        part.close()
        with pytest.raises(mk.MKernelError, match="this group was closed"):
            call(part, GOOD)
        with pytest.raises(mk.MKernelError, match="this group was closed"):
            mk.explain("all_gather_matmul", zeros(4, 5), zeros(5, 3), group=part)
        call(group, GOOD)

    run(work, cluster=(2, 2))


def test_a_broken_group_stays_broken():
    def work(group):
        call(group, GOOD)
        if group.rank == 0:
            return
        for _ in range(2):
            with pytest.raises(mk.CommTimeout, match="can no longer be used"):
                call(group, GOOD)
        with pytest.raises(mk.CommTimeout):
            group.synchronize()
        with pytest.raises(mk.CommTimeout):
            mk.empty(4, 4)

    run(work, cluster=(1, 2))


def test_an_operator_that_is_not_there():
    refused(lambda group: (("all_gather",), {}), "'all_gather'", "all_gather_matmul", op=mk.explain)


# -- memory that two tensors share


@pytest.mark.parametrize("name", ["a", "b"])
def test_out_must_not_overlap_an_input(name):
    """With several ranks, out's rows are written while peers' rows are still to be read."""

    def make(group):
        memory = zeros(12, 6)
        a, b = (memory[:4], zeros(6, 6)) if name == "a" else (zeros(4, 6), memory[:6])
        return (a, b), {"out": memory[3:11]}

    refused(make, "out", name, "overlap")
