"""02: matmul_reduce_scatter and matmul_all_reduce, the second half of a layer that is spread over ranks.

    python examples/02_matmul_reduce_scatter.py          a GPU if there is one, else the simulator
    python examples/02_matmul_reduce_scatter.py cpu      the simulator: 2 nodes x 2 GPUs
    python examples/02_matmul_reduce_scatter.py cuda     4 ranks on the GPUs that are here

In tensor parallelism the second weight of a layer is cut along its depth: every rank multiplies its slice
of the activations by its slice of the weight, and gets a part of every element of the result. The
parts have to be added. The usual way is two calls, one after the other:

    part = a @ w.t()
    torch.distributed.reduce_scatter_tensor(mine, part)    # each rank keeps its rows, or
    torch.distributed.all_reduce(part)                     # all ranks get all rows

mk.matmul_reduce_scatter(a, w.t()) and mk.matmul_all_reduce(a, w.t()) are the same in one kernel: tiles are
sent and added while others are multiplied.
"""

import sys

import torch

import mkernel as mk

ROWS, COLUMNS, DEPTH = 128, 96, 64  # all rows and columns of the result; the depth is a rank's share


# 1. Inputs. Rank r's slices can be made anywhere from the number r, so that results can be checked.
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

    # 3. Each rank keeps its rows of the sum. Bias and residual are added in the same kernel; the residual is
    #    this rank's rows, and the result may take its place.
    rows = ROWS // group.size
    residual = random_matrix(3000 + group.rank, rows, COLUMNS, group.device)
    y = mk.matmul_reduce_scatter(a, w.t(), bias=bias, residual=residual)

    # 4. The check, in float64. What travels is rounded to bf16, once in a node and once between nodes; each
    #    of these roundings is off by at most eps/2 of what is rounded.
    group.synchronize()
    parts = [x.double() @ z.double().t() for x, z in slices]
    mine = slice(group.rank * rows, (group.rank + 1) * rows)
    exact = sum(parts)[mine] + bias.double() + residual.double()
    eps = torch.finfo(torch.bfloat16).eps
    bound = (2 * sum(part.abs() for part in parts)[mine] + exact.abs()) * eps / 2 * 1.01 + 1e-4
    error = (y.double() - exact).abs()
    assert bool((error <= bound).all()), f"rank {group.rank}: {(error - bound).max()} over the bound"

    # 5. Or every rank gets all rows: the same bits on every rank.
    z = mk.matmul_all_reduce(a, w.t(), bias=bias)
    group.synchronize()
    assert all(torch.equal(z, other) for other in group.exchange("z", z))

    # 6. Parts may travel in fp32: twice the bytes, and no rounding on the way.
    precise = mk.matmul_all_reduce(a, w.t(), bias=bias, reduce_dtype=torch.float32)
    group.synchronize()
    exact = sum(parts) + bias.double()
    errors = [(result.double() - exact).norm().item() for result in (z, precise)]
    assert errors[1] < errors[0]

    plan = mk.explain("matmul_all_reduce", a, w.t(), bias=bias)
    return f"{group}: {tuple(y.shape)} and {tuple(z.shape)}, largest error {error.max():.3f}\n{plan}"


# 7. The cluster. Several nodes exist in the simulator, and as processes under torchrun.
if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else ("cuda" if torch.cuda.is_available() else "cpu")
    nodes, gpus_per_node = (2, 2) if device == "cpu" else (1, 4)
    reports = mk.spawn(on_rank, nodes=nodes, gpus_per_node=gpus_per_node, device=device)
    for report in reports:
        print(report.splitlines()[0])
    print("rank 0:", reports[0].split("\n", 1)[1])
