"""Each array that a call keeps in its workspace has bounds of its own, and they are exact: with one element less at its
end, every operator touches what is outside of it, and the simulator says so. Those of a mixture of experts have room
for any routing, so that a test reaches the end of few: there each is taken away."""

import pytest
import torch
from support import attention_reference
from support.moe_reference import Layer
from support.scenarios import (
    MULTICAST,
    REDUCE,
    SCATTER,
    SLICED,
    Attends,
    AttendsBackward,
    FewRows,
    Gathers,
    Routes,
    Sums,
    WeightGrads,
)

from mkernel.runtime.errors import SimulatorError
from mkernel.sim import memory

LAYER = Layer((3, 3), (1, 1), hidden=16, out=16, dtype=torch.float32)
KEYS = attention_reference.Case(64, heads=4, kv_heads=4, dim=64, dtype=torch.float32)
FEW_KEYS = attention_reference.Case(32, heads=4, kv_heads=4, dim=64, dtype=torch.float32)
SCENARIOS = {
    "all_gather_matmul": Gathers((2, 2), calls=2),
    "all_gather_matmul_weight_grad": WeightGrads((2, 2), calls=2),
    "matmul_reduce_scatter": Sums((2, 2), SCATTER, calls=2),
    **{way: Sums((1, 2) if way in (SLICED, MULTICAST) else (2, 2), way, calls=2)
       for way in (REDUCE, SLICED, MULTICAST)},
    **{f"{op}, few rows": FewRows((1, 2), op, rows=8, columns=(32,), calls=2) for op in (Gathers.op, SCATTER)},
    "ring_attention": Attends((2, 2), KEYS, calls=2),
    "ring_attention_backward": AttendsBackward((2, 2), FEW_KEYS, calls=2),
    "moe_dispatch_matmul": Routes((1, 2), "moe_dispatch_matmul", LAYER, calls=2),
    "moe_dispatch": Routes((1, 2), "moe_dispatch", LAYER, calls=2),
    "moe_combine": Routes((1, 2), "moe_combine", LAYER, calls=2),
    "moe_ffn": Routes((2, 1), "moe_ffn", LAYER, calls=2),
}  # fmt: skip
# signals between nodes, of which there is one here, or within a node, where there is one rank
UNUSED = {
    "moe_dispatch_matmul": {"unused", "node_entered", "numbered"},
    "moe_dispatch": {"unused", "node_entered", "numbered"},
    "moe_combine": {"unused", "node_entered", "numbered", "back"},
    "moe_ffn": {"unused", "entered"},
}


SLOW = ("ring_attention", "ring_attention_backward", "moe_combine", "moe_ffn")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in SLOW else ()) for name in SCENARIOS]
)
def test_bounds_are_exact(name, monkeypatch):
    scenario = SCENARIOS[name]
    regions = memory._regions
    seen, missing = {}, None

    def recorded(piece, arrays):
        found = regions(piece, arrays)
        for region, array in zip(found, [array for array in arrays if 0 not in array.shape], strict=True):
            seen[array.name] = array
            if array.name == missing:
                less = array.item if not name.startswith("moe") else region.end - region.start
                region.end -= less
                region.inside = region.inside[:-less] if region.inside is not None else None
        return found

    monkeypatch.setattr(memory, "_regions", recorded)
    scenario.run(0)
    assert seen
    loose = []
    for missing in list(seen):
        try:
            scenario.run(0)
        except SimulatorError as error:
            if "is outside of every tensor that the kernel was given" not in str(error):
                raise
        else:
            loose.append(missing)
    assert set(loose) == UNUSED.get(name, set())
