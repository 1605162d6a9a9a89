"""04: an expert-parallel mixture-of-experts layer, as one call and in two halves.

    python examples/04_moe.py          a GPU if there is one, else the simulator
    python examples/04_moe.py cpu      the simulator: 2 nodes x 2 GPUs
    python examples/04_moe.py cuda     4 ranks on the GPUs of this machine

With expert parallelism each rank holds some of the experts and some of the tokens. A router picks k experts for every
token. This usually takes a chain of calls: sort the tokens by expert, all-to-all, grouped GEMMs, all-to-all back,
weighted sum. mk.moe_ffn does all of that in one kernel per rank.
"""

import sys

import torch

import mkernel as mk

HIDDEN, INTER = 64, 48  # size of a token, and inside an expert
TOKENS, EXPERTS, K = 9, 2, 2  # per rank; experts per token


# 1. Inputs. Every rank can recreate the inputs of rank r from the number r, to check the results.
def random_tensor(number: int, *shape: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return (torch.randn(*shape, generator=generator) * scale).to(device, torch.bfloat16)


def tokens_of(rank: int, device: torch.device) -> torch.Tensor:
    return random_tensor(rank, TOKENS - rank, HIDDEN, device=device)  # ranks may have different numbers of tokens


def matrices_of(rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = random_tensor(100 + rank, EXPERTS, HIDDEN, 2 * INTER, device=device, scale=HIDDEN**-0.5)
    down = random_tensor(200 + rank, EXPERTS, INTER, HIDDEN, device=device, scale=INTER**-0.5)
    return gate_up, down


def on_rank(group: mk.Group) -> str:
    device = group.device
    x = tokens_of(group.rank, device)
    w_gate_up, w_down = matrices_of(group.rank, device)

    # 2. The router scores the experts of all ranks, numbered in rank order, and takes the k best.
    scores = random_tensor(300 + group.rank, len(x), group.size * EXPERTS, device=device).float().softmax(dim=1)
    topk_weights, topk_ids = scores.topk(K, dim=1)

    # 3. The layer as one call. max_tokens bounds the tokens of a rank; with it the ranks need not exchange how many
    #    they have, and the call can be captured in a CUDA graph.
    y = mk.moe_ffn(x, topk_ids, topk_weights, w_gate_up, w_down, max_tokens=TOKENS)

    # 4. The check, in float64: every expert on every token, and the weighted sum of those that were picked.
    group.synchronize()
    exact = torch.zeros_like(x, dtype=torch.float64)
    size = torch.zeros_like(exact)  # the sum of absolute values, for the bound
    for rank in range(group.size):
        gate_up, down = (matrix.double() for matrix in matrices_of(rank, device))
        for expert in range(EXPERTS):
            gate, up = (x.double() @ gate_up[expert]).chunk(2, dim=1)
            inner = torch.nn.functional.silu(gate) * up
            weight = (topk_weights * (topk_ids == rank * EXPERTS + expert)).sum(1, keepdim=True).double()
            exact += weight * (inner @ down[expert])
            size += weight * (inner.abs() @ down[expert].abs())
    error = ((y.double() - exact).abs() / size.clamp_min(1e-6)).max().item()
    bound = 4 * torch.finfo(torch.bfloat16).eps
    assert error <= bound, f"rank {group.rank}: relative error {error} is over {bound}"

    # 5. The same in two halves: dispatch with the first GEMM, your own code on the rows, and the combine. Rows are
    #    grouped by expert; the handle says where each one came from.
    rows, handle = mk.moe_dispatch_matmul(x, topk_ids, w_gate_up, max_tokens=TOKENS)
    group.synchronize()
    counts = handle.counts.tolist()
    gate, up = rows[: sum(counts)].float().chunk(2, dim=1)
    inner = (torch.nn.functional.silu(gate) * up).bfloat16()
    done = torch.zeros(len(rows), HIDDEN, device=device, dtype=torch.bfloat16)
    done[: sum(counts)] = torch.cat([part @ w for part, w in zip(inner.split(counts), w_down)])
    z = mk.moe_combine(done, handle, topk_weights)
    group.synchronize()
    error = ((z.double() - exact).abs() / size.clamp_min(1e-6)).max().item()
    assert error <= 2 * bound, f"rank {group.rank}: relative error {error} is over {2 * bound}"

    # 6. Capacity. The default is sufficient for any routing. A smaller `capacity` saves memory, and exceeding it is an
    #    error on every rank: nothing is dropped silently, and the group remains usable.
    try:
        mk.moe_ffn(x, topk_ids, topk_weights, w_gate_up, w_down, max_tokens=TOKENS, capacity=1)
        group.synchronize()
    except mk.CapacityError as refusal:
        too_small = str(refusal).split(":")[1].strip()
    plan = mk.explain("moe_ffn", x, topk_ids, topk_weights, w_gate_up, w_down, max_tokens=TOKENS)
    return f"{group}: {sum(counts)} rows for {EXPERTS} experts, largest error {error:.4f}; {too_small}\n{plan}"


# 7. The cluster.
if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else ("cuda" if torch.cuda.is_available() else "cpu")
    nodes, gpus_per_node = (2, 2) if device == "cpu" else (1, 4)
    reports = mk.spawn(on_rank, nodes=nodes, gpus_per_node=gpus_per_node, device=device)
    for report in reports:
        print(report.splitlines()[0])
    print("rank 0:", reports[0].split("\n", 1)[1])
