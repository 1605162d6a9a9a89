"""The mixture-of-experts kernels as machine code, with no GPU: tensor cores, TMA, wide copies, no spills."""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.compiled_launches import paced_links
from support.moe_backward_launches import backward_launch
from triton.tools.tensor_descriptor import TensorDescriptor

from mkernel.compiling import REGISTERS, SHARED_MEMORY, compile_launch, launched
from mkernel.ops.moe import combine, dispatch_matmul, ffn
from mkernel.ops.moe.bench import _gemm_alone_kernel, gemm_alone
from mkernel.ops.moe.grouped import Biases
from mkernel.runtime.planning import default_tiles

pytestmark = pytest.mark.thorough  # they take up to a minute each
GROUPS = {"one rank": (1, 1), "four ranks": (1, 4), "two nodes": (2, 2)}
EXPERTS, K, TOKENS, SIZE = 16, 8, 1024, 2048  # of a rank, of a token, of a rank, and of a token and of its results


def launch_of(op, cluster, dtype, paced=False, transposed=False, described=True, tokens=TOKENS, biased=False):
    """What rank 0 of a cluster launches. described: TMA can read the matrices; transposed: they are [out, in]."""

    def matrices(rows, columns):
        if transposed:
            return torch.empty(EXPERTS, columns, rows, dtype=dtype).transpose(1, 2)
        return torch.empty(EXPERTS, rows, columns + 3 * (not described), dtype=dtype)[:, :, :columns]

    def prepare(group):
        x, ids = torch.empty(tokens, SIZE, dtype=dtype), torch.empty(tokens, K, dtype=torch.int64)
        weights, out = torch.empty(tokens, K), torch.empty(tokens, SIZE, dtype=dtype)
        if op == "moe_ffn":
            gate_up, down = matrices(SIZE, 2 * SIZE), matrices(SIZE, SIZE)
            sizes = ffn.agree(group, x, ids, down, None, tokens, None)
            biases = (torch.empty(EXPERTS, 2 * SIZE, dtype=dtype), torch.empty(EXPERTS, SIZE, dtype=dtype))
            given = (group, x, ids, weights, gate_up, down, out, sizes, None)
            return ffn.prepare(*given, biases=Biases(*biases) if biased else ffn.NO_BIASES)
        w = matrices(SIZE, SIZE)
        sizes = dispatch_matmul.agree(group, x, ids, w, None, tokens, None)
        bias = torch.empty(EXPERTS, SIZE, dtype=dtype) if biased else None
        launch, y, handle = dispatch_matmul.prepare(group, x, ids, w, sizes, None, bias)
        return launch if op == "moe_dispatch_matmul" else combine.prepare(group, y, handle, weights, out, None)

    return launched(prepare, cluster, links=paced_links(paced))


@cache
def _kept(op, dtype, group, chosen):
    return compile_launch(launch_of(op, GROUPS[group], dtype, **dict(chosen)))


def build(op, dtype, group, **chosen):
    """What a call compiles to; each is compiled once."""
    return _kept(op, dtype, group, tuple(sorted(chosen.items())))


def check(compiled, op):
    assert "wgmma.mma_async" in compiled.ptx
    # the layer keeps a few scalars on the stack, none of which its loops over k need
    assert compiled.spilled <= (64 if op == "moe_ffn" else 0)
    assert compiled.shared <= SHARED_MEMORY
    assert compiled.registers * 8 * 32 <= REGISTERS


def check_default_tile(compiled, op):
    """Tensor cores fed by TMA, everything in registers, 16 bytes a copy."""
    assert ".target sm_90a" in compiled.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared::(cluster|cta)\.global", compiled.ptx), "no TMA load"
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta", compiled.ptx), "no TMA store"
    check(compiled, op)
    assert compiled.ptx.count("st.global.v4") >= 16
    for narrow in ("st.global.b16", "st.global.v2.b16"):
        assert compiled.ptx.count(narrow) <= 16, narrow  # NaN, where nothing was computed


def check_combine(compiled):
    """Rows are read and written 16 bytes at a time, and none is spilled."""
    # the assembler keeps some scalars on the stack to have more warps; more would be a piece of a row
    assert compiled.spilled <= 64
    assert compiled.ptx.count("ld.global.v4") >= 8
    assert compiled.ptx.count("st.global.v4") >= 2


def check_same_binary(compiled, op):
    """Numbers that follow the batch make no other binary, which would be compiled while a model is being served. As
    many tokens as are divisible by 16, or as are not."""
    assert compile_launch(launch_of(op, GROUPS["two nodes"], torch.bfloat16, tokens=997)).ptx == compiled.ptx


def test_dispatch_matmul():
    compiled = build("moe_dispatch_matmul", torch.bfloat16, "two nodes")
    check_default_tile(compiled, "moe_dispatch_matmul")
    check_same_binary(compiled, "moe_dispatch_matmul")
    # A result leaves while the next tile begins: it has a place of its own in shared memory, beside the operands'
    # stages. Triton gives it one only in a loop with a count.
    tiles = default_tiles(torch.device("cuda"), torch.bfloat16, SIZE, True)
    operands = (tiles.tile_m + tiles.tile_n) * tiles.tile_k * tiles.stages
    assert compiled.shared >= 2 * (operands + tiles.tile_m * tiles.tile_n)


def test_dispatch_matmul_in_one_node():
    """With matrices that are [out, in], and paced links."""
    compiled = build("moe_dispatch_matmul", torch.float16, "four ranks", transposed=True, paced=True)
    check_default_tile(compiled, "moe_dispatch_matmul")


def test_ffn():
    compiled = build("moe_ffn", torch.bfloat16, "two nodes")
    check_default_tile(compiled, "moe_ffn")
    check_same_binary(compiled, "moe_ffn")
    # tiles are in memory before they are signalled
    assert re.search(r"cp\.async\.bulk\.wait_group\s+0", compiled.ptx)
    assert "fence.proxy.async.global" in compiled.ptx


@pytest.mark.parametrize("op", ["moe_dispatch_matmul", "moe_ffn"])
def test_biases(op):
    """They cost no spills beyond those of a call without them."""
    check_default_tile(build(op, torch.bfloat16, "two nodes", biased=True), op)


def test_combine():
    compiled = build("moe_combine", torch.bfloat16, "two nodes")
    check_combine(compiled)
    check_same_binary(compiled, "moe_combine")
    check_combine(build("moe_combine", torch.float32, "one rank"))


def test_the_compute_role_alone():
    """As `mkernel bench` runs it: in the shared memory of the whole kernel, and with tiles of both heights."""
    launch = launch_of("moe_dispatch_matmul", (1, 1), torch.bfloat16)
    alone = replace(launch, kernel=_gemm_alone_kernel, arguments=gemm_alone(launch, blocks=5))
    compiled = compile_launch(alone)
    check(compiled, "moe_dispatch_matmul")
    assert {"n128k16", "n256k16"} <= set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64(n\d+k16)", compiled.ptx))


def test_dispatch_matmul_through_pointers():
    check(build("moe_dispatch_matmul", torch.bfloat16, "four ranks", described=False), "moe_dispatch_matmul")


def test_fp32():
    compiled = build("moe_dispatch_matmul", torch.float32, "one rank")
    assert "fma.rn.f32" in compiled.ptx
    assert not compiled.spilled


def nested_descriptors(value):
    """Tensor descriptors inside of structures."""
    if not isinstance(value, tuple):
        return []
    return [part for part in value if isinstance(part, TensorDescriptor)] + [
        found for part in value for found in nested_descriptors(part)
    ]


@pytest.mark.parametrize("op", ["moe_dispatch_matmul", "moe_combine", "moe_ffn"])
def test_descriptors_are_parameters_of_their_own(op):
    """Triton compiles a kernel with a descriptor inside of a structure, but cannot launch it."""
    launch = launch_of(op, (2, 2), torch.bfloat16)
    assert len(launch.arguments) <= 12
    for name, value in launch.arguments.items():
        assert not nested_descriptors(value), name


# -- backward passes


@pytest.mark.parametrize("step", ["redispatch", "weight grad", "product", "forward"])
def test_products_of_the_backward_pass(step):
    """Tensor cores, fed by TMA, and no spills. The forward pass that keeps its activations is here, too."""
    compiled = compile_launch(backward_launch(step))
    assert "wgmma.mma_async" in compiled.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared::(cluster|cta)\.global", compiled.ptx), "no TMA load"
    assert compiled.spilled <= (96 if step == "forward" else 0)
    assert compiled.shared <= SHARED_MEMORY
    assert compiled.registers * 8 * 32 <= REGISTERS


@pytest.mark.parametrize("step", ["redispatch alone", "gated", "gated with bias", "combine", "bias grad"])
def test_rows_of_the_backward_pass(step):
    compiled = compile_launch(backward_launch(step))
    assert not compiled.spilled
    assert compiled.ptx.count("ld.global.v4") + compiled.ptx.count("ld.global.v2") >= 2
    if step != "bias grad":
        assert compiled.ptx.count("ld.global.v4") >= 2
        assert compiled.ptx.count("st.global.v4") >= 2


def test_a_launch_in_the_place_of_a_gradient_that_is_not_needed():
    assert not re.search("(ld|st).global", compile_launch(backward_launch("nothing")).ptx)
