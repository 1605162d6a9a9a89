"""Tracing as machine code: nothing at all when it is off, and no spills when it is on."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from compiled import gathers, reduces
from mutation import OP, PACKAGES, module_name, mutated

import mkernel
from mkernel.compiling import SHARED_MEMORY, compile_launch

CALL = re.compile(r"^ *((?:since = )?trace(?:_time)?\((?:comm\.)?context.*\))$", re.MULTILINE)


def gathering(cluster):
    def build(module, context, folder, monkeypatch):
        launch = gathers(cluster, module=module)
        if context == "*u64":
            launch.arguments["context"] = launch.arguments["context"].view(torch.uint64)
        return compile_launch(launch)

    return build


def summing(op, cluster, **call):
    """An operator that sums over ranks: where its loop over tiles and steps is one, it must stay pipelined."""

    def build(module, context, folder, monkeypatch):
        launch = reduces(op, cluster, module=module, **call)
        if context == "*u64":
            launch.arguments["context"] = launch.arguments["context"].view(torch.uint64)
        made = compile_launch(launch)
        assert "hopper" in launch.kernel.fn.__name__ or "wgmma.wait_group.sync.aligned 1;" in made.ptx
        return made

    return build


# operator -> how to compile it
KERNELS = {
    "all_gather_matmul": gathering((2, 2)),
    "all_gather_matmul hopper": gathering((1, 4)),
    "matmul_reduce_scatter hopper": summing("reduce_scatter", (1, 4), paced=True),
    "matmul_reduce_scatter": summing("reduce_scatter", (2, 2)),
    "matmul_all_reduce": summing("all_reduce", (1, 4)),
    "matmul_all_reduce multicast": summing("all_reduce", (1, 4), multicast=True),
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
    package = source / "ops" / PACKAGES.get(op, op)
    own = {f"{OP}/{path.stem}": path for path in package.glob("*.py")}
    texts |= {name: path.read_text() for name, path in own.items()}
    found = {(stem, call) for stem, text in texts.items() for call in CALL.findall(text)}
    assert {stem for stem, _ in found} >= {"context", "signals", "requests"}
    assert {stem for stem, _ in found} & set(own)
    # longer calls first: one may be a part of another
    changes = sorted(((stem, call, "pass") for stem, call in found), key=lambda change: -len(change[1]))
    module = mutated(folder, op, *changes)
    for path in Path(module.__file__).parent.glob("*.py"):
        assert not re.search(r"\btrace(_time)?\(", path.read_text())
    return module


@pytest.mark.parametrize("op", KERNELS)
def test_nothing_when_off_and_no_spills_when_on(tmp_path, monkeypatch, op):
    name = op.partition(" ")[0]
    module = importlib.import_module(f"mkernel.{module_name(name)}")
    plain = KERNELS[op](module, "*i64", tmp_path, monkeypatch)
    stripped = KERNELS[op](without_calls(tmp_path, name), "*i64", tmp_path, monkeypatch)
    assert code(plain.ptx) == code(stripped.ptx)
    assert "/* trace */" not in plain.ptx

    # a context of unsigned words: events are written
    traced = KERNELS[op](module, "*u64", tmp_path, monkeypatch)
    assert traced.ptx.count("/* trace */") >= 10
    assert not traced.spilled
    assert traced.shared <= SHARED_MEMORY
    assert traced.ptx.count("bar.sync") == plain.ptx.count("bar.sync"), "a barrier more than without"
