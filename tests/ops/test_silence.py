"""What a GPU computes silently, the simulator computes silently: infinities and NaN are values like others."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from support.operator_calls import DTYPES, run

import mkernel as mk

LARGEST = {
    "large": lambda dtype: torch.finfo(dtype).max / 4,
    "inf": lambda dtype: float("inf"),
    "nan": lambda dtype: float("nan"),
}


def filled(value, dtype, *shape):
    """Random signs and sizes, and the value in half of all places."""
    generator = torch.Generator().manual_seed(len(shape))
    signs = torch.randn(*shape, generator=generator).sign()
    chosen = torch.rand(*shape, generator=generator) < 0.5
    return torch.where(chosen, signs * value, torch.randn(*shape, generator=generator)).to(dtype)


def gathered(value, dtype):
    return [
        mk.all_gather_matmul(filled(value, dtype, 9, 20), filled(value, dtype, 20, 7)),
        mk.all_gather_matmul_weight_grad(filled(value, dtype, 9, 20), filled(value, dtype, 18, 7)),
    ]


def summed(value, dtype):
    a, b = filled(value, dtype, 8, 20), filled(value, dtype, 20, 7)
    bias = filled(value, dtype, 7)
    return [
        mk.matmul_reduce_scatter(a, b, bias=bias, residual=filled(value, dtype, 4, 7)),
        mk.matmul_all_reduce(a, b, bias=bias, residual=filled(value, dtype, 8, 7)),
        mk.matmul_all_reduce(a, b, config=mk.Config(tile_m=16, tile_n=16, ctas=2)),
    ]


def attended(value, dtype):
    query, key, values = (filled(value, dtype, 1, 2, 16, 64) for _ in range(3))
    nothing = torch.full_like(query, float("nan"))
    return [
        mk.ring_attention(query, key, values, return_lse=True)[0],
        mk.ring_attention(query, key, values, is_causal=True, cu_seqlens=[0, 3, 32]),
        mk.ring_attention(nothing, key, values, config=mk.Config(tile_n=16)),  # rows in which all scores are NaN
        *mk.ring_attention_backward(query, query, key, values, values, filled(value, torch.float32, 1, 2, 16)),
    ]


def routed(value, dtype):
    x, ids = filled(value, dtype, 6, 20), torch.arange(12).view(6, 2) % 4
    weights = filled(value, torch.float32, 6, 2)
    y, handle = mk.moe_dispatch_matmul(x, ids, filled(value, dtype, 2, 20, 12))
    return [
        mk.moe_combine(y, handle, weights),
        mk.moe_ffn(x, ids, weights, filled(value, dtype, 2, 20, 24), filled(value, dtype, 2, 12, 20)),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.parametrize("operators", [gathered, summed, attended, routed])
def test_no_warnings(operators, largest, dtype):
    value = LARGEST[largest](dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for results in run(lambda group: operators(value, dtype)):
            assert not all(result.isfinite().all() for result in results), "nothing overflowed: this tests nothing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_the_switch(dtype):
    """Each part is finite, their sum is not."""

    def work(group):
        a, b = torch.full((32, 16), torch.finfo(dtype).max / 2, dtype=dtype), torch.eye(16, 256, dtype=dtype)
        return mk.matmul_all_reduce(a, b, fixed_order=False, config=mk.Config(tile_m=32, tile_n=32, ctas=2))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for y in run(work, cluster=(1, 4), multicast=True):
            assert y[:, :16].isinf().all()


def test_warnings_of_the_caller():
    """Between launches, and while they run, numpy warns of what ranks compute themselves."""

    def work(group):
        with group.world.stream(group.rank, "beside"):
            mk.all_gather_matmul(torch.full((4, 4), 1e30), torch.full((4, 4), 1e30))
            for _ in range(2):
                with pytest.warns(RuntimeWarning, match="overflow encountered in multiply"):
                    np.full(2, 1e38, dtype=np.float32) * np.float32(1e38)
                group.exchange("nothing", None)
        group.synchronize()

    run(work)
