"""Tracing as machine code: nothing at all when it is off, and not more spilled when it is on."""

import ast
import importlib
import re

import pytest
import torch
from support.compiled_launches import gathers, reduces
from support.package_copies import copy_package, module_of

from mkernel.compiling import SHARED_MEMORY, compile_launch


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


TRACING = {"trace", "trace_time"}
MODULES = {
    "all_gather_matmul": "ops.all_gather_matmul",
    "matmul_reduce_scatter": "ops.reduce.reduce_scatter",
    "matmul_all_reduce": "ops.reduce.all_reduce",
}
# operator -> how to compile it
KERNELS = {
    "all_gather_matmul": gathering((2, 2)),
    "all_gather_matmul hopper": gathering((1, 4)),
    "matmul_reduce_scatter hopper": summing("reduce_scatter", (1, 4), paced=True),
    "matmul_all_reduce": summing("all_reduce", (2, 2)),
    "matmul_all_reduce hopper": summing("all_reduce", (1, 4)),
}


def code(ptx):
    """The instructions, without what says where in the source they come from."""
    ptx = re.sub(r"\.section\s+\.debug.*", "", ptx, flags=re.DOTALL)
    lines = ptx.splitlines()
    return [line for line in lines if not re.match(r"\s*(\.loc|\.file|//|\$L__tmp\d+:|\$L__func)", line)]


class WithoutCalls(ast.NodeTransformer):
    """Takes every call of the tracing functions out, with the assignment of what it returns."""

    def __init__(self):
        self.found = set()

    def visit_FunctionDef(self, node):
        if node.name in TRACING:
            return node
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def _visit_statement(self, node):
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in TRACING:
            self.found.add(call.func.id)
            return ast.Pass()
        return self.generic_visit(node)

    visit_Expr = visit_Assign = _visit_statement

    def visit_Name(self, node):
        assert node.id not in TRACING, f"line {node.lineno}: a call that is no statement of its own"
        return node


def without_calls(folder, module):
    """The operator's module with every call of the tracing functions taken out, and out of the vocabulary."""
    remover = WithoutCalls()
    name = copy_package(folder, remover.visit)
    assert remover.found == TRACING
    return module_of(folder, name, module)


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.thorough
def test_nothing_when_off_and_not_more_spilled_when_on(tmp_path, monkeypatch, op):
    name = MODULES[op.partition(" ")[0]]
    module = importlib.import_module(f"mkernel.{name}")
    plain = KERNELS[op](module, "*i64", tmp_path, monkeypatch)
    stripped = KERNELS[op](without_calls(tmp_path, name), "*i64", tmp_path, monkeypatch)
    assert code(plain.ptx) == code(stripped.ptx)
    assert "/* trace */" not in plain.ptx

    # a context of unsigned words: events are written
    traced = KERNELS[op](module, "*u64", tmp_path, monkeypatch)
    assert traced.ptx.count("/* trace */") >= 10
    assert traced.spilled <= plain.spilled
    assert traced.shared <= SHARED_MEMORY
    assert traced.ptx.count("bar.sync") == plain.ptx.count("bar.sync"), "a barrier more than without"
