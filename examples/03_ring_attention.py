"""03: ring_attention, for a sequence that is too long for one GPU.

    python examples/03_ring_attention.py          a GPU if there is one, else the simulator
    python examples/03_ring_attention.py cpu      the simulator: 2 nodes x 2 GPUs
    python examples/03_ring_attention.py cuda     4 ranks on the GPUs of this machine

With context parallelism each rank holds a part of the sequence: its queries, keys and values. Attention
needs the keys and values of all ranks. Usually they are passed around in a ring, with a call of flash
attention and a merge of partial results at each step. mk.ring_attention is one kernel, which attends to
what has arrived while the rest is in flight.
"""

import itertools
import sys

import torch
import torch.nn.functional as F

import mkernel as mk

BATCH, HEADS, KV_HEADS, DIM = 1, 4, 2, 64
POSITIONS = 256  # of the whole sequence


# 1. Inputs. Here every rank creates the whole sequence, to check the results.
def sequence(number: int, heads: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(BATCH, heads, POSITIONS, DIM, generator=generator).to(device, torch.bfloat16)


# 2. What every rank runs.
def on_rank(group: mk.Group) -> tuple[str, torch.Tensor]:
    whole = [sequence(number, heads, group.device) for number, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]

    # 3. A part of the sequence: rank r holds the r-th of `size` equal pieces. The arguments have the names,
    #    shapes and meaning of F.scaled_dot_product_attention; is_causal refers to the whole sequence.
    query, key, value = (tensor.chunk(group.size, 2)[group.rank] for tensor in whole)
    out = mk.ring_attention(query, key, value, is_causal=True, enable_gqa=True)

    # 4. The check: the whole sequence in float64, then this rank's part of it.
    group.synchronize()
    exact = F.scaled_dot_product_attention(*(tensor.double() for tensor in whole), is_causal=True, enable_gqa=True)
    error = (out.double() - exact.chunk(group.size, 2)[group.rank]).abs().max().item()
    bound = 2 * torch.finfo(torch.bfloat16).eps
    assert error <= bound, f"rank {group.rank}: error {error} is over {bound}"

    # 5. With a causal mask the last rank has the most work, and the first one the least. In the zigzag layout
    #    each rank holds a piece from the front and one from the back, which balances the work.
    query, key, value = (mk.to_zigzag(tensor) for tensor in whole)
    out, lse = mk.ring_attention(query, key, value, is_causal=True, enable_gqa=True, layout="zigzag", return_lse=True)
    group.synchronize()
    assert (out.double() - mk.to_zigzag(exact)).abs().max().item() <= bound
    assert lse.shape == out.shape[:3]  # the log-sum-exp of each row, for merging with other attention

    # 6. Packed documents: a position sees only its own document, which may span several ranks.
    bounds = [0, 40, 130, POSITIONS]
    packed = mk.ring_attention(
        query, key, value, is_causal=True, enable_gqa=True, layout="zigzag", cu_seqlens=bounds
    )  # fmt: skip
    group.synchronize()
    pieces = [
        F.scaled_dot_product_attention(
            *(tensor[:, :, start:end].double() for tensor in whole), is_causal=True, enable_gqa=True
        )
        for start, end in itertools.pairwise(bounds)
    ]
    assert (packed.double() - mk.to_zigzag(torch.cat(pieces, 2))).abs().max().item() <= bound

    # 7. Any lengths: ranks may hold different numbers of positions, and other numbers of queries than keys, as with a
    #    cache of keys and the query of one new token. The last query has the position of the last key.
    each, others = POSITIONS // group.size, group.size - 1
    seq_lens, query_lens = [each - 3] * others + [each + 3 * others], [0] * others + [1]
    mine = slice(sum(seq_lens[: group.rank]), sum(seq_lens[: group.rank + 1]))
    token = whole[0][:, :, POSITIONS - query_lens[group.rank] :]
    newest = mk.ring_attention(
        token, whole[1][:, :, mine], whole[2][:, :, mine], is_causal=True, enable_gqa=True, seq_lens=seq_lens,
        query_lens=query_lens,
    )  # fmt: skip
    group.synchronize()
    assert newest.shape[2] == query_lens[group.rank]
    if newest.numel():
        assert (newest.double() - exact[:, :, -1:]).abs().max().item() <= bound

    # 8. Memory. Other ranks' keys and values go through a buffer `steps` times the size of one rank's, two by
    #    default. mk.explain says how large it is, which kernel is used, and why.
    plan = mk.explain(
        "ring_attention", query, key, value, is_causal=True, enable_gqa=True, layout="zigzag",
        config=mk.Config(steps=4),
    )  # fmt: skip
    return f"{group}: {tuple(out.shape)}, largest error {error:.4f}, bound {bound:.4f}\n{plan}", out.cpu()


# 9. The cluster. mk.from_zigzag restores the original order from the parts of all ranks.
if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else ("cuda" if torch.cuda.is_available() else "cpu")
    nodes, gpus_per_node = (2, 2) if device == "cpu" else (1, 4)
    results = mk.spawn(on_rank, nodes=nodes, gpus_per_node=gpus_per_node, device=device)
    for report, _ in results:
        print(report.splitlines()[0])
    print("rank 0:", results[0][0].split("\n", 1)[1])
    print("the whole sequence again:", tuple(mk.from_zigzag([part for _, part in results]).shape))
