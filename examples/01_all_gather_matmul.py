"""01: all_gather_matmul, from a single call to all of its options.

    python examples/01_all_gather_matmul.py          a GPU if there is one, else the simulator
    python examples/01_all_gather_matmul.py cpu      the simulator: 2 nodes x 2 GPUs
    python examples/01_all_gather_matmul.py cuda     4 ranks on the GPUs of this machine

With tensor and sequence parallelism each rank holds some rows of the activations and some columns of a
weight. Before the multiplication every rank needs all rows. This usually takes two calls:

    torch.distributed.all_gather_into_tensor(everything, a)
    y = everything @ w.t()

mk.all_gather_matmul(a, w.t()) does the same in one kernel, which multiplies rows as they arrive.
"""

import sys

import torch

import mkernel as mk

ROWS, COLUMNS, DEPTH = 64, 96, 128  # per rank: a is ROWS x DEPTH, the weight COLUMNS x DEPTH


# 1. Inputs. Every rank can recreate the rows of rank r from the number r, to check the results.
def random_matrix(number: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, columns, generator=generator).to(device, torch.bfloat16)


# 2. What every rank runs. mk.spawn passes the group of all ranks, which is also the current group: the
#    default of every operator.
def on_rank(group: mk.Group) -> str:
    a = random_matrix(group.rank, ROWS, DEPTH, group.device)
    w = random_matrix(1000 + group.rank, COLUMNS, DEPTH, group.device)

    # 3. The call. w.t() is a view and is read without a copy. The result has the rows of rank 0, then those
    #    of rank 1, and so on.
    y = mk.all_gather_matmul(a, w.t())

    # 4. The check, against the product in float64. A sum of DEPTH products of bf16 numbers, rounded to bf16,
    #    is off by a few eps times sqrt(DEPTH). On a GPU, calls return before they are done; synchronize
    #    waits, and raises if a rank did not arrive in time.
    group.synchronize()
    everything = torch.cat([random_matrix(rank, ROWS, DEPTH, group.device) for rank in range(group.size)])
    exact = everything.double() @ w.double().t()
    bound = 4 * DEPTH**0.5 * torch.finfo(torch.bfloat16).eps
    error = (y.double() - exact).abs().max().item()
    assert error <= bound, f"rank {group.rank}: error {error} is over {bound}"

    # 5. Rows in the symmetric heap. mk.empty is collective. With several nodes, the network sends such rows
    #    directly; plain tensors are staged first.
    shared = mk.empty(ROWS, DEPTH, dtype=torch.bfloat16)
    shared.copy_(a)

    # 6. `out` takes the result, and return_gathered=True also returns the gathered rows (for a backward
    #    pass, for example). The same inputs give the same bits.
    out = torch.empty_like(y)
    _, gathered = mk.all_gather_matmul(shared, w.t(), out=out, return_gathered=True)
    group.synchronize()
    assert torch.equal(out, y)
    assert torch.equal(gathered, everything)

    # 7. mk.Config overrides how the work is divided. mk.explain says what a call would do, and why, without
    #    launching it.
    config = mk.Config(chunk_rows=32)
    mk.all_gather_matmul(a, w.t(), out=out, config=config)
    group.synchronize()
    assert torch.equal(out, y)
    plan = mk.explain("all_gather_matmul", shared, w.t(), config=config)
    return f"{group}: {tuple(y.shape)}, largest error {error:.3f}, bound {bound:.3f}\n{plan}"


# 8. The cluster.
if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else ("cuda" if torch.cuda.is_available() else "cpu")
    nodes, gpus_per_node = (2, 2) if device == "cpu" else (1, 4)
    reports = mk.spawn(on_rank, nodes=nodes, gpus_per_node=gpus_per_node, device=device)
    for report in reports:
        print(report.splitlines()[0])
    print("rank 0:", reports[0].split("\n", 1)[1])
