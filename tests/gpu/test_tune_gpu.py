"""Tuning on a GPU: at least as good as the default, and used by itself afterwards.

What takes time is compiling. So the three shapes of an operator run the same binaries (their sizes are alike as far as
Triton looks at them), and only the first of them gets the time to compile: the default, and first of all other
numbers of CTAs, of which the smallest is a bad choice. Operators can be tuned side by side, each in a process of its
own (`-k moe_ffn`), if they take turns to measure: see `alone` in harness.py.
"""

import pytest
import torch
from harness import alone
from support.workloads import workload_of

import mkernel as mk
from mkernel.runtime import tuned
from mkernel.tuning import tune

RANKS = 4
LINKS = mk.Links(nvlink=450 / RANKS)
FIRST = {"all_gather_matmul": 15.0, "ring_attention": 30.0, "moe_dispatch_matmul": 45.0, "moe_ffn": 75.0}  # seconds
LATER = 4.0
SHAPES = {
    "all_gather_matmul": [(16384, 2048, 8192), (8192, 2048, 8192), (8192, 8192, 4096)],
    "matmul_reduce_scatter": [(8192, 8192, 8192), (4096, 8192, 8192), (8192, 2048, 16384)],
    "matmul_all_reduce": [(4096, 4096, 8192), (2048, 8192, 16384), (4096, 8192, 8192)],
    "ring_attention": [(2, 16, 12288, 128), (1, 32, 12288, 128), (2, 16, 20480, 128)],
    "moe_dispatch_matmul": [(8192, 2048, 7168), (4096, 4096, 4096), (16384, 2048, 4096)],
    "moe_combine": [(8192, 7168), (4096, 4096), (16384, 4096)],
    "moe_ffn": [(8192, 2048, 7168), (4096, 2048, 4096), (16384, 1024, 4096)],
}
_compiled: set[str] = set()  # operators whose kernels this process has


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "tuned.json"))
    monkeypatch.setattr(tuned, "_reported", set())
    return tuned.path()


@pytest.mark.parametrize(("op", "shape"), [(op, shape) for op, shapes in SHAPES.items() for shape in shapes])
def test_at_least_as_good_as_the_default(op, shape):
    seconds = LATER if op in _compiled else FIRST.get(op, 10.0)
    found = tune(
        workload_of(op), shape, nodes=1, gpus_per_node=RANKS, dtype=torch.bfloat16, links=LINKS, seconds=seconds
    )
    _compiled.add(op)
    result = found.result
    print(
        f"{op} {shape}: default {result.default:.3f} ms, best {result.best_time:.3f}, worst {result.worst_time:.3f}, "
        f"{len(result.trials)} tried, {result.best}"
    )
    assert result.best_time <= result.default
    assert result.best_time <= 0.9 * result.worst_time

    def on_rank(group):
        call = workload_of(op).make(group, shape, torch.bfloat16)
        assert str(call.tried.explain(None)).endswith("- configuration: tuned")
        default = call.run(mk.Config()).clone()
        chosen = call.run(None)
        group.synchronize()
        error = (chosen.double() - default.double()).abs().max().item()
        assert error <= 8 * torch.finfo(torch.bfloat16).eps * default.abs().max().item()

    with alone():
        mk.spawn(on_rank, gpus_per_node=RANKS, device="cuda", links=LINKS)


def test_a_group_takes_what_is_in_the_file_and_says_so(file):
    m, n, k = 256, 512, 256

    def on_rank(group):
        a = torch.ones(m, k, device=group.device, dtype=torch.bfloat16)
        b = torch.ones(k, n, device=group.device, dtype=torch.bfloat16)
        assert (mk.all_gather_matmul(a, b) == k).all()
        return str(mk.explain("all_gather_matmul", a, b)).splitlines()[-1], tuned.place_of(group)

    first = mk.spawn(on_rank, gpus_per_node=2, device="cuda")
    assert {line for line, _ in first} == {"- configuration: default"}
    place = first[0][1]
    assert torch.cuda.get_device_name() in place
    tunable = workload_of("all_gather_matmul").tunable
    tuned.write(file, tunable.entries(place, torch.bfloat16, mk.Config(chunk_rows=32, group_m=4), {}, m=m, n=n, k=k))
    assert {line for line, _ in mk.spawn(on_rank, gpus_per_node=2, device="cuda")} == {"- configuration: tuned"}
    file.write_text("{ damaged")
    with pytest.warns(UserWarning, match="is ignored, because it cannot be read"):
        third = mk.spawn(on_rank, gpus_per_node=2, device="cuda")
    assert {line for line, _ in third} == {"- configuration: default"}
