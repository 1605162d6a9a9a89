"""What matmul_reduce_scatter and matmul_all_reduce refuse, in which words, and that a refused call leaves the
group usable."""

from __future__ import annotations

import pytest
import torch
from support.operator_calls import run
from support.reduce_reference import Sum, call

import mkernel as mk

SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
GOOD = Sum(12, 6, 8)


@pytest.fixture(params=[SCATTER, REDUCE])
def name(request):
    return request.param


def zeros(*shape, dtype=torch.float32, **options):
    return torch.zeros(shape, dtype=dtype, **options)


def refused(name, cases, cluster=(1, 2)):
    """Each case: arguments of a call that every rank is refused, and words of the error."""

    def work(group):
        for make, words in cases:
            args, kwargs = make(group) if callable(make) else make
            before = group.heap.nbytes
            with pytest.raises(mk.ArgumentError) as caught:
                getattr(mk, name)(*args, **kwargs)
            assert group.heap.nbytes == before
            for word in words:
                assert word in str(caught.value)
            if not callable(make):
                with pytest.raises(mk.ArgumentError) as again:
                    mk.explain(name, *args, **kwargs)
                assert str(again.value) == str(caught.value)
        call(group, name, GOOD)

    run(work, cluster=cluster)


def test_tensors(name):
    half = torch.float16
    rows = 4 if name == REDUCE else 2
    shape = f"({rows}, 3)"
    a, b = zeros(4, 5), zeros(5, 3)
    refused(name, [
        ((([[1.0]], b), {}), ["a must be a torch.Tensor", "list"]),
        (((a, None), {}), ["b must be a torch.Tensor", "NoneType"]),
        (((a, b), {"out": 3}), ["out must be a torch.Tensor", "int"]),
        (((a, b), {"bias": 3}), ["bias must be a torch.Tensor", "int"]),
        (((a, b), {"residual": [1]}), ["residual must be a torch.Tensor", "list"]),
        *([(((zeros(4), b), {}), ["a must have at least 2 dimensions", "(4,)"])] if name != REDUCE else []),
        (((zeros(2, 4, 5), zeros(5)), {}), ["b must have 2 dimensions", "(5,)"]),
        (((zeros(2, 4, 5), b), {"residual": [1]}), ["residual must be a torch.Tensor", "list"]),
        (((a, b), {"bias": zeros(1, 3)}), ["bias must have 1 dimension,", "(1, 3)"]),
        (((a, b), {"residual": zeros(3)}), ["residual must have 2 dimensions", "(3,)"]),
        (((zeros(4, 5, device="meta"), b), {}), ["a is on meta", "this rank's device is cpu"]),
        (((a, b), {"bias": zeros(3, device="meta")}), ["bias is on meta"]),
        (((a.double(), b.double()), {}), ["a has dtype torch.float64", "torch.bfloat16"]),
        (((a, b.half()), {}), ["b has dtype torch.float16", "a has torch.float32", "the same"]),
        (((a, zeros(6, 3)), {}), ["a's columns (5)", "b's rows (6)"]),
        (((a, b), {"bias": zeros(4)}), ["bias has 4 elements", "b has 3 columns"]),
        (((a, b), {"bias": zeros(3, dtype=half)}), ["bias has dtype torch.float16", "the same"]),
        (((a, b), {"residual": zeros(rows, 4)}), [f"residual has shape ({rows}, 4)", shape]),
        (((a, b), {"residual": zeros(rows, 3, dtype=half)}), ["residual has dtype torch.float16", "the same"]),
        (((a, b), {"out": zeros(rows, 4)}), [f"out has shape ({rows}, 4)", f"the result has {shape}"]),
        (((a, b), {"out": zeros(rows, 3, dtype=half)}), ["out has dtype torch.float16", "torch.float32"]),
        (((a, b), {"out": zeros(1, 3).expand(rows, 3)}), ["out is an expanded tensor"]),
        (((a, b), {"reduce_dtype": half}), ["reduce_dtype must be torch.float32 or a's dtype", "torch.float16"]),
        (((a, b), {"reduce_dtype": "fp32"}), ["reduce_dtype", "fp32"]),
        (((a, b), {"group": 7}), ["group must be a mk.Group", "int"]),
    ])  # fmt: skip


def test_out_has_no_gradient(name):
    rows = 4 if name == REDUCE else 2

    def make(which):
        shapes = {"a": (4, 5), "b": (5, 3), "bias": (3,), "residual": (rows, 3), "out": (rows, 3)}
        tensors = {each: zeros(*shape) for each, shape in shapes.items()}
        tensors[which].requires_grad_()
        a, b = tensors.pop("a"), tensors.pop("b")
        return (a, b), tensors

    words = ["out cannot be combined with tensors that require grad"]
    cases = ("a", "b", "bias", "residual", "out")
    refused(name, [(lambda _, which=which: make(which), words) for which in cases])


def test_out_must_not_overlap_an_input(name):
    rows = 6 if name == REDUCE else 3
    memory = zeros(20, 6)
    out = memory[:rows]
    refused(name, [
        (((memory[2:8], zeros(6, 6)), {"out": out}), ["out overlaps a in memory"]),
        (((zeros(6, 6), memory[2:8]), {"out": out}), ["out overlaps b in memory"]),
        (((zeros(6, 6), zeros(6, 6)), {"out": out, "bias": memory[1]}), ["out overlaps bias in memory"]),
        (((zeros(6, 6), zeros(6, 6)), {"out": out, "residual": memory[1 : rows + 1]}),
         ["out overlaps residual in memory"]),
    ])  # fmt: skip


def test_rows_that_can_not_be_shared():
    refused(SCATTER, [
        (((zeros(5, 4), zeros(4, 3)), {}), ["a has 5 rows", "2 ranks", "pad a to 6 rows", "matmul_all_reduce"]),
    ])  # fmt: skip
    run(lambda group: call(group, REDUCE, Sum(5, 3, 4)))


REFUSED_CONFIGS = {
    "tile_m is no power of two": (mk.Config(tile_m=24), ["config.tile_m", "power of two", "24"]),
    "tile_n is too small": (mk.Config(tile_n=8), ["config.tile_n", "from 16 to"]),
    "group_m is 0": (mk.Config(group_m=0), ["config.group_m", "from 1 to"]),
    "stages is 0": (mk.Config(stages=0), ["config.stages", "from 1 to"]),
    "ctas is 0": (mk.Config(ctas=0), ["config.ctas is 0", "at least 1"]),
    "too many CTAs": (mk.Config(ctas=7), ["config.ctas is 7", "only 6 CTAs", "resident"]),
    "send_ctas": (mk.Config(send_ctas=1), ["config.send_ctas does not apply to", "all its CTAs compute"]),
    "intra_ctas": (mk.Config(intra_ctas=0), ["config.intra_ctas does not apply to"]),
    "chunk_rows": (mk.Config(chunk_rows=16), ["config.chunk_rows does not apply to", "it sends whole tiles"]),
}


def test_config(name):
    args = zeros(4, 5), zeros(5, 3)
    cases = [((args, {"config": config}), words) for config, words in REFUSED_CONFIGS.values()]
    refused(name, [*cases, ((args, {"config": {"tile_m": 16}}), ["config must be a mk.Config", "dict"])])


def test_ranks_must_agree(name):
    a, b = zeros(12, 5), zeros(5, 3)
    differing = {
        "m=12": lambda odd: ((zeros(24, 5) if odd else a, b), {}),
        "n=3": lambda odd: ((a, zeros(5, 4) if odd else b), {}),
        "dtype=torch.float32": lambda odd: ((a.half(), b.half()) if odd else (a, b), {}),
        "tile_m=32": lambda odd: ((a, b), {"config": mk.Config(tile_m=16) if odd else None}),
        "group_m=2": lambda odd: ((a, b), {"config": mk.Config(group_m=1) if odd else None}),
        "reduce_dtype=torch.float16": lambda odd: (
            (a.half(), b.half()), {"reduce_dtype": torch.float32 if odd else None}
        ),
    }  # fmt: skip
    default = 1 if name == REDUCE else 3
    differing[f"ctas={default}"] = lambda odd: ((a, b), {"config": mk.Config(ctas=2) if odd else None})
    if name == REDUCE:
        differing["bias=False"] = lambda odd: ((a, b), {"bias": zeros(3) if odd else None})
    refused(
        name,
        [
            (lambda group, make=make: make(group.rank == 1), ["all ranks of the group must pass the same values", word])
            for word, make in differing.items()
        ],
        cluster=(1, 3),
    )


def test_no_group(name):
    with pytest.raises(mk.MKernelError, match="there is no group yet"):
        getattr(mk, name)(zeros(4, 5), zeros(5, 3))
