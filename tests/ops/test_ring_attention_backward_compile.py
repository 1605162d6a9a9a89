"""The kernel of ring_attention_backward compiles for GPUs that are not there, with the arguments of real launches."""

from __future__ import annotations

import pytest
import torch
from support.attention_reference import Case

from mkernel import compiling
from mkernel.compiling import SHARED_MEMORY, compile_launch
from mkernel.ops.attention.backward import prepare
from mkernel.ops.attention.backward.launch import Tensors
from mkernel.ops.attention.sequences import Pattern, Scoring

LENGTH = 512


def launched(cluster=(1, 4), capability=90, dlse=False, **case):
    """The launch of a call on a cluster of such GPUs."""
    given = {"heads": 8, "kv_heads": 8, "dtype": torch.bfloat16, "dim": 128, **case}
    shape = Case(LENGTH, **given)

    def prepared(group):
        query, key = (torch.empty(1, n, LENGTH, shape.dim, dtype=shape.dtype) for n in (shape.heads, shape.kv_heads))
        lse = torch.empty(1, shape.heads, LENGTH)
        results = [torch.empty_like(tensor) for tensor in (query, key, key)]
        tensors = Tensors(query, query, key, key, query, lse, lse if dlse else None, *results)
        return prepare(group, tensors, Pattern(shape.causal, shape.layout, shape.documents), Scoring(), None)

    return compiling.launched(prepared, cluster, capability, ctas=33)


CAUSAL = dict(causal=True, layout="zigzag")
CALLS = {
    "64 columns": (dict(dim=64, **CAUSAL), 16),  # three scalars, since masks have lengths of queries and of keys
    "128 columns": (CAUSAL, 128),
    "one rank": (dict(cluster=(1, 1)), 128),
    "everything at once": (
        dict(cluster=(2, 2), documents=(0, 100, 4 * LENGTH), dlse=True, kv_heads=2, **CAUSAL), 512
    ),
    "256 columns": (dict(dim=256), 512),
    "fp32": (dict(dtype=torch.float32), 512),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        *((name, 90) for name in CALLS if name not in ("one rank", "128 columns")),  # see test_compile_ones.py
        ("64 columns", 80),
    ],
)  # fmt: skip
@pytest.mark.thorough
def test_it_compiles(name, capability):
    """With few spilled registers, or none, and tensor cores."""
    call, spilled = CALLS[name]
    compiled = compile_launch(launched(capability=capability, **call), capability)
    assert compiled.spilled <= spilled
    assert compiled.shared <= (SHARED_MEMORY if capability == 90 else 163 * 1024)
    if call.get("dtype") != torch.float32:
        wide = capability == 90 and name != "256 columns"  # whose tiles have fewer rows than a warpgroup multiplies
        assert ("wgmma.mma_async" if wide else "mma.sync") in compiled.ptx
