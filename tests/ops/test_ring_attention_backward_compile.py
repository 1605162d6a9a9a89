"""The portable kernel of ring_attention_backward compiles for GPUs that are not there, with the arguments of real
launches."""

from __future__ import annotations

import pytest
import torch
from support.attention_reference import Case

import mkernel as mk
from mkernel import compiling
from mkernel.compiling import SHARED_MEMORY, compile_launch
from mkernel.ops.attention.backward import prepare
from mkernel.ops.attention.backward.launch import Tensors
from mkernel.ops.attention.lengths import Lengths
from mkernel.ops.attention.sequences import Pattern, Scoring

LENGTH = 512
PORTABLE = mk.Config(warps=8)  # a configuration that the kernel for Hopper does not have


def launched(cluster=(1, 4), capability=90, dlse=False, **case):
    """The launch of a call on a cluster of such GPUs, of rank 0."""
    shape = Case(**{"length": LENGTH, "heads": 8, "kv_heads": 8, "dtype": torch.bfloat16, "dim": 128, **case})
    lengths = None if shape.seq_lens is None else Lengths(shape.seq_lens, shape.seq_lens)

    def prepared(group):
        query = torch.empty(1, shape.heads, shape.rows_of(group.rank), shape.dim, dtype=shape.dtype)
        key = torch.empty(1, shape.kv_heads, shape.keys_of(group.rank), shape.dim, dtype=shape.dtype)
        value = key if shape.value_dim is None else key.new_empty(*key.shape[:3], shape.value_dim)
        out = query if shape.value_dim is None else query.new_empty(*query.shape[:3], shape.value_dim)
        lse = torch.empty(query.shape[:3])
        results = [torch.empty_like(tensor) for tensor in (query, key, value)]
        tensors = Tensors(out, query, key, value, out, lse, lse if dlse else None, *results)
        pattern = Pattern(shape.causal, shape.layout, shape.documents, lengths=lengths)
        return prepare(group, tensors, pattern, Scoring(), PORTABLE)

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
    "192 and 128 columns": (dict(dim=192, value_dim=128, **CAUSAL), 512),
    "64 and 128 columns": (dict(dim=64, value_dim=128), 128),
    "few queries": (dict(queries=16, causal=True), 128),
    "unequal lengths": (dict(seq_lens=(700, 512, 1, 33), causal=True), 512),  # 704 positions in documents: 300
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
        few_rows = ("256 columns", "192 and 128 columns")  # in a tile: fewer than a warpgroup multiplies
        wide = capability == 90 and name not in few_rows
        assert ("wgmma.mma_async" if wide else "mma.sync") in compiled.ptx
