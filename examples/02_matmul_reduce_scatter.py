"""02: matmul_reduce_scatter and matmul_all_reduce, the second half of a tensor-parallel layer.

    python examples/02_matmul_reduce_scatter.py          a GPU if there is one, else the simulator
    python examples/02_matmul_reduce_scatter.py cpu      the simulator: 2 nodes x 2 GPUs
    python examples/02_matmul_reduce_scatter.py cuda     4 ranks on the GPUs of this machine

In tensor parallelism the second weight of a layer is sharded along k: every rank multiplies its slice of
the activations by its slice of the weight, and gets a partial sum of every element of the result. This
usually takes two calls:

    part = a @ w.t()
    torch.distributed.reduce_scatter_tensor(mine, part)    # each rank keeps its rows, or
    torch.distributed.all_reduce(part)                     # all ranks get all rows

mk.matmul_reduce_scatter(a, w.t()) and mk.matmul_all_reduce(a, w.t()) do the same in one kernel, which sends
and adds tiles while it multiplies others.
"""

import sys

import torch

import mkernel as mk

ROWS, COLUMNS, DEPTH = 128, 96, 64  # of the result; the depth is one rank's share of k


# 1. Inputs. Every rank can recreate the slices of rank r from the number r, to check the results.
def random_matrix(number: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, columns, generator=generator).to(device, torch.bfloat16)


# 2. What every rank runs.
def on_rank(group: mk.Group) -> str:
    slices = [
        (random_matrix(rank, ROWS, DEPTH, group.device), random_matrix(1000 + rank, COLUMNS, DEPTH, group.device))
        for rank in range(group.size)
    ]
    a, w = slices[group.rank]
    bias = random_matrix(2000, 1, COLUMNS, group.device)[0]  # the same on every rank

    # 3. Each rank keeps its rows of the sum. Bias and residual are added in the same kernel; the residual has
    #    this rank's rows, and `out` may be the residual itself.
    rows = ROWS // group.size
    residual = random_matrix(3000 + group.rank, rows, COLUMNS, group.device)
    y = mk.matmul_reduce_scatter(a, w.t(), bias=bias, residual=residual)

    # 4. The check, in float64. Partials are rounded to bf16 once within a node and once between nodes; each
    #    rounding is off by at most eps/2 of the rounded value.
    group.synchronize()
    parts = [x.double() @ z.double().t() for x, z in slices]
    mine = slice(group.rank * rows, (group.rank + 1) * rows)
    exact = sum(parts)[mine] + bias.double() + residual.double()
    eps = torch.finfo(torch.bfloat16).eps
    bound = (2 * sum(part.abs() for part in parts)[mine] + exact.abs()) * eps / 2 * 1.01 + 1e-4
    error = (y.double() - exact).abs()
    assert bool((error <= bound).all()), f"rank {group.rank}: {(error - bound).max()} over the bound"

    # 5. Or every rank gets all rows, with the same bits on every rank.
    z = mk.matmul_all_reduce(a, w.t(), bias=bias)
    group.synchronize()
    assert all(torch.equal(z, other) for other in group.exchange("z", z))

    # 6. Partials can travel in fp32: twice the bytes, and no rounding on the way.
    precise = mk.matmul_all_reduce(a, w.t(), bias=bias, reduce_dtype=torch.float32)
    group.synchronize()
    exact = sum(parts) + bias.double()
    errors = [(result.double() - exact).norm().item() for result in (z, precise)]
    assert errors[1] < errors[0]

    plan = mk.explain("matmul_all_reduce", a, w.t(), bias=bias)
    return f"{group}: {tuple(y.shape)} and {tuple(z.shape)}, largest error {error.max():.3f}\n{plan}"


# 7. The cluster.
if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else ("cuda" if torch.cuda.is_available() else "cpu")
    nodes, gpus_per_node = (2, 2) if device == "cpu" else (1, 4)
    reports = mk.spawn(on_rank, nodes=nodes, gpus_per_node=gpus_per_node, device=device)
    for report in reports:
        print(report.splitlines()[0])
    print("rank 0:", reports[0].split("\n", 1)[1])
