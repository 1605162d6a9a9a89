"""The latency of calls, on the simulator and on processes: figures of no meaning, in tables of the right form."""

import pytest
import torch
from support.forked_processes import run_ranks

from mkernel.bench import calls

SMALL = {
    "all_gather_matmul": (8, 16, 16),
    "matmul_reduce_scatter": (8, 16, 16),
    "matmul_all_reduce": (8, 16, 16),
    "ring_attention": (1, 2, 16, 64),
    "moe_ffn": (16, 16, 16),
    "moe_dispatch_matmul": (16, 16, 16),
}


@pytest.fixture
def quick(monkeypatch):
    for name, value in dict(WARM_UP=1, BATCH=1, BATCHES=1).items():
        monkeypatch.setattr(calls, name, value)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.thorough
def test_every_operator_has_a_case(quick, capsys, ranks):
    known = {op for op, _ in calls.cases(None, ())}
    assert known == set(SMALL)
    results = calls.main(list(SMALL.items()), ranks=ranks, dtype="fp32", device="cpu")
    assert [result["op"] for result in results] == list(SMALL)
    assert all(result["host_us"] > 0 and result["library_host_us"] > 0 for result in results)
    printed = capsys.readouterr().out
    for op, shape in SMALL.items():
        assert f"{op} " in printed
        assert "x".join(map(str, shape)) in printed
    assert "beside torch.mm" in printed


def test_shapes_of_one_operator():
    assert calls.cases("matmul_all_reduce", [(1, 2, 3)]) == [("matmul_all_reduce", (1, 2, 3))]
    assert len(calls.cases("matmul_all_reduce", ())) > 10


@pytest.mark.thorough
def test_processes():
    program = """
        from mkernel.bench import calls
        calls.WARM_UP = calls.BATCH = calls.BATCHES = 1
        calls.main([("all_gather_matmul", (8, 16, 16))], dtype="fp32")
    """
    (zero, code), (one, other) = run_ranks(program, 2)
    assert (code, other) == (0, 0), zero + one
    assert "2 processes" in zero
    assert "all_gather_matmul" in zero
    assert "all_gather_matmul" not in one


def test_figures_in_a_table():
    one = dict(op="a", shape=[1, 2], ranks=1, library="torch.mm", host_us=30.0, library_host_us=20.0)
    two = one | dict(kernel_us=8.0, library_kernel_us=6.0)
    table = calls.table_of([one, two])
    cells = [list(column.cells) for column in table.columns]
    assert cells[4] == ["1.50", "1.50"]
    assert cells[7] == ["-", "0.75"]
    assert torch.get_default_dtype() == torch.float32
