"""The schedules of mKernel's MoE Dispatch + GEMM and Dispatch + FFN + Combine, for `mkernel.scale.validation`: `size`
tokens of 7168 on 16 ranks, top 8 of 256 experts.

A rank sends all its tokens to its counterpart in the other node, whether they are needed there or not. Dispatching CTAs
read rows of the tokens of their node and then of the other node, 16 at a time, from the GPU that has them, and write
them expert by expert. The other CTAs multiply blocks of 128 rows, those of the node first. The two benchmarks route
differently. For the GEMM alone, token t goes to the 8 experts from 8 t on: all are on one rank, and every expert gets
equally many tokens. For the FFN, experts are drawn with random probabilities: the rank with the most tokens is the
slowest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mkernel.scale.engine import Engine, Link
from mkernel.scale.peer import SMS, TILE_M, TILE_N, Peer, claim, move, run_list

Array = Any
HIDDEN, OUT, EXPERTS, TOPK = 7168, 2048, 256, 8
TOKEN = HIDDEN * 2  # bytes
CHUNK, ROWS = 512 * 1024, 16
# by size: CTAs that dispatch, and that multiply
SPLIT = {8192: (32, 92), 16384: (44, 72), 32768: (44, 80), 65536: (44, 80), 131072: (44, 80)}
SPLIT_OF_FFN = SPLIT | {131072: (40, 84)}
# By size: how many times the average the rank with the most tokens has, if probabilities are what torch.rand(256) draws
# on a GPU with the number of tokens as its seed (Philox), as in its benchmark.
MOST = {8192: 1.246, 16384: 1.274, 32768: 1.325, 65536: 1.296, 131072: 1.170}
BARRIERS = 4


def _dispatch(engine: Engine, peer: Peer, dispatching: int, near: int, far: Array) -> list[Array]:
    """Blocks of rows, `near` of the node's tokens and then those that the network has brought at the times `far`.
    Returns when they are in place."""
    lanes, share = engine.lanes("dispatching CTAs", dispatching), (engine.gpus_per_node - 1) / engine.gpus_per_node
    placed = []
    for ready in (np.zeros(near), far):
        slices = np.repeat(ready, TILE_M // ROWS)
        done = move(lanes, slices, ROWS * TOKEN / peer.machine.place, engine.nvlink, ROWS * TOKEN * share)
        placed.append(done.reshape(len(ready), -1).max(1))
    return placed


def run_dispatch(engine: Engine, peer: Peer, size: int) -> None:
    dispatching, multiplying = SPLIT[size]
    nbytes = size // engine.ranks * TOKEN
    chunks = -(-nbytes // CHUNK)
    landed = np.sort(engine.network.send(np.full(chunks, engine.start), nbytes / chunks, 1)[1])
    # blocks of an expert are in the order of tokens, so each waits for a part of what one rank sends, or for all of it
    experts = EXPERTS // engine.ranks
    blocks = size * TOPK // engine.ranks // TILE_M // 2 // experts
    parts = max(blocks // engine.gpus_per_node, 1)
    last = np.ceil((np.arange(blocks) % parts + 1) / parts * chunks).astype(int) - 1
    placed = _dispatch(engine, peer, dispatching, blocks * experts, np.tile(landed[last], experts))
    ctas = engine.lanes("CTAs", multiplying)
    for part in placed:
        run_list(ctas, np.repeat(part, OUT // TILE_N), peer.tile(HIDDEN, multiplying))


def run_ffn(engine: Engine, peer: Peer, size: int) -> None:
    """After the first GEMM, all CTAs go through the activation, the second GEMM, weighted rows to the ranks of the
    node, and sums, with barriers between. Calls are timed back to back and share an epoch, so that from the second one
    on they find the arrival flags of the first: none waits for the network, and so it is here."""
    machine, (dispatching, multiplying) = peer.machine, SPLIT_OF_FFN[size]
    experts, tokens = EXPERTS // engine.ranks, size // engine.ranks
    rows = tokens * TOPK * MOST[size]
    blocks = round(rows / TILE_M + experts / 2)  # the last one of an expert is half full
    near = max(round(rows / 2 / TILE_M - experts / 2), 0)
    placed = _dispatch(engine, peer, dispatching, near, np.zeros(blocks - near))
    ctas, everyone = engine.lanes("CTAs", multiplying), engine.lanes("all CTAs", SMS)
    for part in placed:
        run_list(ctas, np.repeat(part, 2 * OUT // TILE_N), peer.tile(HIDDEN, multiplying))
    everyone.wait(ctas.clock.max(), "the GEMM")
    everyone.work(rows * 3 * OUT * 2 / machine.memory + BARRIERS * machine.collective_seconds, "activate")
    claim(everyone, np.zeros(blocks * HIDDEN // TILE_N), peer.tile(OUT, SMS), "multiply")
    everyone.wait(everyone.clock.max(), "the GEMM")
    moved = rows * TOKEN * (engine.gpus_per_node - 1) / engine.gpus_per_node
    everyone.wait(Link(peer.scattered).carry(everyone.clock.max(), moved), "NVLink")
    # reads the rows, and reads and writes sums of tokens: of the node (fp32), for the other node, and from there
    everyone.work((tokens * TOPK * TOKEN + tokens * TOKEN * (2 + 1 + 2 + 2 + 1)) / machine.memory, "sum rows")
