"""Tracing as machine code: nothing at all when it is off, and no spills when it is on."""

import importlib
import re
from pathlib import Path

import pytest
import torch
import triton.language as tl
from compiled import compile_launch, gathers
from compiling import SHARED_MEMORY, built, compiled, source_with
from mutation import OP, mutated
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

import mkernel

CALL = re.compile(r"^ *((?:since = )?trace(?:_time)?\((?:comm\.)?context.*\))$", re.MULTILINE)


def gathering(cluster):
    def build(module, context, folder, monkeypatch):
        launch = gathers(cluster, module=module)
        if context == "*u64":
            launch.arguments["context"] = launch.arguments["context"].view(torch.uint64)
        return compile_launch(launch)

    return build


def summing_on_hopper(module, context, folder, monkeypatch):
    kernel = module.matmul_reduce_scatter_hopper_kernel

    def operand(*block):
        layout = gl.NVMMASharedLayout.get_default_for(list(block), tl.bfloat16)
        return f"tensordesc<bf16{list(block)},{layout!r}>"

    constants = dict(B_TRANSPOSED=True, GPUS=4, GROUP=8, PACED=True)
    types = {name: "i32" for name in kernel.arg_names if name not in constants} | dict(
        context=context, data_start="i64", half="i64", a=operand(128, 64), b=operand(256, 64), c=operand(64, 128)
    )
    aligned = ("context", "rows", "n", "k", "data_start", "half")
    source = source_with(kernel, types, constants, aligned, GluonASTSource)
    return from_source(source, context, folder, num_warps=4)


def from_source(source, context, folder, **options):
    source.signature = {**source.signature, "context": context}
    return built(source, folder, **options)


def summing(kernel, **group):
    """An operator that sums over ranks: its loop over tiles and steps must stay pipelined."""

    def build(module, context, folder, monkeypatch):
        function = getattr(module, kernel)
        constants = dict(
            DTYPE=tl.bfloat16, OUT=tl.bfloat16, PACED=False, BIAS=False, RESIDUAL=False, RESIDUAL_DESCRIPTOR=False,
            A_DESCRIPTOR=True, B_DESCRIPTOR=True, B_TRANSPOSED=True, C_DESCRIPTOR=True, PRECISION="tf32",
            TILE_M=128, TILE_N=256, TILE_K=64, GROUP=8, c_column_stride=1, a_column_stride=1, bias=None, residual=None,
            **group,
        )  # fmt: skip
        constants = {name: value for name, value in constants.items() if name in function.arg_names}
        types = dict(
            context=context, data_start="i64", half="i64", a="tensordesc<bf16[1, 128, 64]>",
            b="tensordesc<bf16[256, 64]>", c="tensordesc<bf16[1, 128, 128]>",
        )  # fmt: skip
        made = compiled(
            function, types, constants, unaligned=("signals", "nanoseconds_per_mib"), folder=folder,
            num_warps=8, num_stages=3,
        )  # fmt: skip
        assert "wgmma.wait_group.sync.aligned 1;" in made.ptx, "the loop is not pipelined"
        return made

    return build


# operator -> how to compile it
KERNELS = {
    "all_gather_matmul": gathering((2, 2)),
    "all_gather_matmul hopper": gathering((1, 4)),
    "matmul_reduce_scatter_hopper": summing_on_hopper,
    "matmul_reduce_scatter": summing("matmul_reduce_scatter_kernel", SIZE=4, GPUS=2),
    "matmul_all_reduce": summing("two_level_kernel", SIZE=4, GPUS=4),
    "matmul_all_reduce_multicast": summing("multicast_kernel", SIZE=4, GPUS=4, IN_SWITCH=False),
}


def code(ptx):
    """The instructions, without what says where in the source they come from."""
    ptx = re.sub(r"\.section\s+\.debug.*", "", ptx, flags=re.DOTALL)
    lines = ptx.splitlines()
    return [line for line in lines if not re.match(r"\s*(\.loc|\.file|//|\$L__tmp\d+:|\$L__func)", line)]


def without_calls(folder, op):
    """The operator's module with every call of the tracing functions taken out, and out of the vocabulary."""
    source = Path(mkernel.__file__).parent
    texts = {path.stem: path.read_text() for path in (source / "lang").glob("*.py") if path.stem != "trace"}
    own = {op: source / "ops" / f"{op}.py"}
    if (source / "ops" / op).is_dir():
        own = {f"{OP}/{path.stem}": path for path in (source / "ops" / op).glob("*.py")}
    texts |= {name: path.read_text() for name, path in own.items()}
    found = {(stem, call) for stem, text in texts.items() for call in CALL.findall(text)}
    assert {stem for stem, _ in found} >= {"context", "signals", "requests"}
    assert {stem for stem, _ in found} & set(own)
    # longer calls first: one may be a part of another
    changes = sorted(((stem, call, "pass") for stem, call in found), key=lambda change: -len(change[1]))
    module = mutated(folder, op, *changes)
    for path in Path(module.__file__).parent.glob("*.py" if (source / "ops" / op).is_dir() else f"{op}.py"):
        assert not re.search(r"\btrace(_time)?\(", path.read_text())
    return module


@pytest.mark.parametrize("op", KERNELS)
def test_nothing_when_off_and_no_spills_when_on(tmp_path, monkeypatch, op):
    name = op.partition(" ")[0]
    module = importlib.import_module(f"mkernel.ops.{name}")
    plain = KERNELS[op](module, "*i64", tmp_path, monkeypatch)
    stripped = KERNELS[op](without_calls(tmp_path, name), "*i64", tmp_path, monkeypatch)
    assert code(plain.ptx) == code(stripped.ptx)
    assert "/* trace */" not in plain.ptx

    # a context of unsigned words: events are written
    traced = KERNELS[op](module, "*u64", tmp_path, monkeypatch)
    assert traced.ptx.count("/* trace */") >= 10
    assert not (traced.spilled if hasattr(traced, "spilled") else traced.spills)
    assert traced.shared <= SHARED_MEMORY
    assert traced.ptx.count("bar.sync") == plain.ptx.count("bar.sync"), "a barrier more than without"
