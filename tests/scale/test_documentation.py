"""The tables of docs/scale.md have the figures that the model gives."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mkernel import operators
from mkernel.runtime.world import Links
from mkernel.scale.cluster import member, memory_of
from mkernel.scale.machine import load
from mkernel.scale.predict import predict, predict_late
from mkernel.scale.validation import ASIDE, median, points

TEXT = (Path(__file__).parents[2] / "docs/scale.md").read_text()
NODES = (2, 4, 8, 16, 64, 256, 1024)
MACHINE = load("h200-cx7")
MASK = {"causal": True, "zigzag": True}
EXPERTS = {"experts": 16, "topk": 8}
# by operator: shape on one node, which of its numbers grow with the nodes, the shape for strong scaling, and options
CALLS = {
    "all_gather_matmul": ((32768, 2048, 8192), (0,), (524288, 2048, 8192), {}),
    "matmul_reduce_scatter": ((32768, 8192, 16384), (0, 2), (524288, 8192, 131072), {}),
    "matmul_all_reduce": ((16384, 8192, 16384), (2,), (16384, 8192, 131072), {}),
    "ring_attention": ((1, 32, 65536, 128), (2,), (1, 32, 4194304, 128), MASK),
    "ring_attention_backward": ((1, 32, 65536, 128), (2,), (1, 32, 4194304, 128), MASK | {"kv_heads": 4}),
    "moe_dispatch_matmul": ((16384, 2048, 7168), (0,), (524288, 2048, 7168), EXPERTS),
    "moe_ffn": ((16384, 2048, 7168), (0,), (524288, 2048, 7168), EXPERTS),
}


def shape_on(op, nodes, scaling):
    shape, growing, fixed, _ = CALLS[op]
    if scaling == "strong":
        return fixed
    return tuple(size * nodes if i in growing else size for i, size in enumerate(shape))


def rows_of(op, scaling, network):
    """The cells of an operator in the table of that network and scaling."""
    section = TEXT.split(f"### {scaling.capitalize()} scaling")[1].split("\n### ")[0]
    table = section.split(f"`{network}`")[1]
    line = next(line for line in table.splitlines() if line.startswith(f"| `{op}` |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


@pytest.mark.thorough
@pytest.mark.parametrize("network", ["h200-cx7", "h200-efa"])
@pytest.mark.parametrize("scaling", ["weak", "strong"])
@pytest.mark.parametrize("op", CALLS)
def test_predictions(op, scaling, network):
    """Of attention, up to 64 nodes: its predictions for more take minutes."""
    cells = rows_of(op, scaling, network)
    assert len(cells) == len(NODES)
    machine = load(network)
    for nodes, cell in zip(NODES, cells):
        if "attention" in op and nodes > 64:
            break
        one = predict(op, shape_on(op, nodes, scaling), machine=machine, nodes=nodes, options=CALLS[op][3])
        assert cell == f"{one.fraction:.2f} {one.bound.removesuffix(' CTAs')}, {one.speedup:.2f}x", nodes


@pytest.mark.parametrize("op", [op for op in CALLS if op != "ring_attention_backward"])
def test_what_fits_into_memory(op):
    cells = []
    for nodes in (16, 64, 128, 256, 1024):
        with member(nodes, 8, 0, ctas=132, capability=90, links=Links()) as group:
            held = memory_of(
                group, operators.find(op), shape_on(op, nodes, "weak"), torch.bfloat16, CALLS[op][3], None
            )  # fmt: skip
        cells.append(f"**{held / 1e9:.0f}**" if held > MACHINE.capacity else f"{held / 1e9:.0f}")
    assert f"| `{op}` | {' | '.join(cells)} |" in TEXT


def test_the_table_of_measured_figures():
    rows = [[cell.strip() for cell in line.split("|")] for line in TEXT.splitlines() if line.count("|") == 8]
    for one in points():
        shape, difference = " x ".join(map(str, one.shape)), f"{one.error:+.1%}"
        found = [row for row in rows if row[3].startswith(shape) and row[2] == f"{one.nodes} x {one.ranks}"]
        assert any(f"{one.predicted:.3g}" in row and difference in row for row in found), one


def test_held_out_rows_of_which_no_part_was_measured():
    """Those of the README, without rows of which a part calibrates a constant."""
    parts = [("moe_dispatch_matmul", (8192, 2048, 7168)), ("moe_ffn", (8192, 2048, 7168)),
             ("matmul_all_reduce", (128, 8192, 8192))]  # fmt: skip
    found = [one for one in points() if one.readme and one.is_emulated and one.use == ASIDE]
    errors = [abs(one.error) for one in found if (one.op, one.shape) not in parts]
    assert len(errors) == len(found) - 3
    figures = f"the model is off by {median(errors):.1%} (median) and {max(errors):.1%} (worst)"
    assert f"For the {len(errors)} remaining rows, {figures}" in TEXT


CHANGES = {
    "as it is": {},
    "any number of requests in flight, instead of 768": {"in_flight": 10**6},
    "64 requests in flight": {"in_flight": 64},
    "3.5 us of the proxy for a request, instead of 0.5": {"request_seconds": 3.5e-6},
    "50 us of latency, instead of 5": {"network_seconds": 5e-5},
    "the network idles for 10 us behind each signal (a fence)": {"fence_seconds": 1e-5},
    "a CTA copies 20 GB/s, instead of 33": {"copy": 2e10},
    "the network reaches 70% of its rate, instead of 90%": {"network_share": 0.7},
    "switches are oversubscribed 2:1 beyond 8 nodes": {"pod_nodes": 8, "oversubscription": 2.0},
    "PCIe carries 32 GB/s, instead of 63": {"pcie": 3.2e10},
    "the switches of NVLink carry half of what the GPUs send": {"nvlink_switches": 4 * MACHINE.nvlink},
    "four rails, each with a quarter of the rate": {"rails": 4},
    "one rank begins 100 us after the others": {"late": 1e-4},
    "one rank begins 1 ms after the others": {"late": 1e-3},
}


@pytest.mark.thorough
@pytest.mark.parametrize("change", CHANGES)
def test_sensitivity(change):
    given = dict(CHANGES[change])
    late = given.pop("late", 0.0)
    machine = replace(MACHINE, **given)
    cells = []
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        for nodes in (16, 128):
            one = predict_late(late, op, shape_on(op, nodes, "weak"), machine=machine, nodes=nodes, options={})
            cells.append(f"{one.fraction:.2f}")
    assert f"| {change} | {' | '.join(cells)} |" in TEXT
