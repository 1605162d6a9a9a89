"""Tracing as machine code: nothing at all when it is off, and no spills when it is on."""

import re
from pathlib import Path

import pytest
import test_compile
import test_compile_hopper
import torch
import triton
from mutation import mutated
from test_compile import TWO_NODES, Compiled
from triton.backends.compiler import GPUTarget

import mkernel
from mkernel.runtime.planning import default_tiles

CALL = re.compile(r"^ *((?:since = )?trace(?:_time)?\(context.*\))$", re.MULTILINE)
TILES = default_tiles(torch.device("cuda"), torch.bfloat16, 8192, True)
HOPPER = dict(B_TRANSPOSED=True, GPUS=4, GROUP=8, PACED=False)


def portable():
    source = test_compile.source_of(torch.bfloat16, TILES, True, **TWO_NODES)
    return source, dict(num_warps=TILES.warps, num_stages=TILES.stages)


def for_hopper():
    return test_compile_hopper.source_of(torch.bfloat16, **HOPPER), dict(num_warps=4)


def compiled(source, options):
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def code(ptx):
    """The instructions, without what says where in the source they come from."""
    ptx = re.sub(r"\.section\s+\.debug.*", "", ptx, flags=re.DOTALL)
    lines = ptx.splitlines()
    return [line for line in lines if not re.match(r"\s*(\.loc|\.file|//|\$L__tmp\d+:|\$L__func)", line)]


def without_calls(folder, op):
    """The operator's module with every call of the tracing functions taken out, and out of the vocabulary."""
    source = Path(mkernel.__file__).parent
    texts = {path.stem: path.read_text() for path in (source / "lang").glob("*.py") if path.stem != "trace"}
    texts[op] = (source / "ops" / f"{op}.py").read_text()
    found = {(stem, call) for stem, text in texts.items() for call in CALL.findall(text)}
    assert {stem for stem, _ in found} >= {"context", "signals", "requests", op}
    # longer calls first: one may be a part of another
    changes = sorted(((stem, call, "pass") for stem, call in found), key=lambda change: -len(change[1]))
    module = mutated(folder, op, *changes)
    assert not CALL.search(Path(module.__file__).read_text())
    return module


def test_the_same_code_as_without_tracing_calls(tmp_path, monkeypatch):
    ours = compiled(*portable()).asm["ptx"]
    stripped = without_calls(tmp_path, "all_gather_matmul")
    monkeypatch.setattr(test_compile, "all_gather_matmul_kernel", stripped.all_gather_matmul_kernel)
    assert code(ours) == code(compiled(*portable()).asm["ptx"])
    assert "trace" not in "\n".join(code(ours))


def test_the_same_code_on_hopper(tmp_path, monkeypatch):
    ours = compiled(*for_hopper()).asm["ptx"]
    stripped = without_calls(tmp_path, "all_gather_matmul_hopper")
    monkeypatch.setattr(
        test_compile_hopper, "all_gather_matmul_hopper_kernel", stripped.all_gather_matmul_hopper_kernel
    )
    assert code(ours) == code(compiled(*for_hopper()).asm["ptx"])


@pytest.mark.parametrize("kernel", [portable, for_hopper])
def test_traced(tmp_path, kernel):
    """A context of unsigned words: events are written, by one thread, and everything stays in registers."""
    plain = compiled(*kernel()).asm["ptx"]
    source, options = kernel()
    source.signature = {**source.signature, "context": "*u64"}
    traced = Compiled(compiled(source, options), tmp_path)
    assert traced.ptx.count("/* trace */") >= 10
    assert not traced.spills, traced.usage
    assert traced.shared <= test_compile.SHARED_MEMORY
    # no barrier more than without
    assert traced.ptx.count("bar.sync") == plain.count("bar.sync")
