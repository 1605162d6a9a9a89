"""Arguments of the ring_attention_backward kernel, and how a CTA finds its tasks in the schedule."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Exchange(NamedTuple):
    """How partials of dk and dv travel: slots and their signals. See `protocol.layout`."""

    partials: Any  # Slots
    partial: Any  # Words
    node_sums: Any  # Slots
    node_sum: Any  # Words


class Call(NamedTuple):
    """A call. Tensors are `Heads` of ops/attention/call.py. The roles that move keys and values read k, v, mask,
    rounds, kv_heads, dim, TILE_N, DIM and COPY, as in a call of ring_attention."""

    q: Any
    k: Any
    v: Any
    out: Any  # the result of the forward pass
    dout: Any  # its gradient
    dq: Any
    dk: Any
    dv: Any
    lse: Any  # pointer to the log-sum-exp of the forward pass
    dlse: Any  # pointer to its gradient; None unless DLSE
    delta: Any  # pointer to a number per row, in the Gluon kernel to two: see `_prepare` of each kernel
    slots: Any  # pointer to the panels of other ranks; None with one rank, and in the Gluon kernel
    partial: Any  # sums of tiles of dq between two parts of a unit; None unless PARTS
    schedule: Any  # which CTA has which tasks: see schedule.py
    ranges: Any  # which rows see a block of keys: see `plan.ranges_of`
    mask: Any  # Mask
    rounds: Any  # Rounds
    reductions: Any  # Rounds, whose tasks, done and freed are those of the partials of a round
    exchange: Any  # Exchange
    preparing: Any  # Words: how many CTAs have computed their share of delta
    prepared: Any  # Words: all have
    scale: Any  # what products or, with SOFTCAP, their tanh are multiplied by, times log2(e)
    cap_scale: Any  # of products in front of tanh, times 2 * log2(e); None unless SOFTCAP
    factor: Any  # of products, in front of tanh with SOFTCAP
    batch: Any
    heads: Any
    kv_heads: Any
    dim: Any  # of queries and keys
    value_dim: Any  # of values; None if it is the same
    blocks: Any  # tiles of queries per head
    tiles: Any  # blocks of keys per panel, of TILE_N keys; in the Gluon kernel, of twice as many
    SENDERS: Any  # number of send CTAs
    INTRAS: Any  # number of intra CTAs
    PARTS: Any  # a unit takes several rounds
    DLSE: Any
    SOFTCAP: Any  # scores are softcap * tanh(score / softcap)
    PRECISION: Any
    TILE_M: Any
    TILE_N: Any
    DIM: Any  # dim, rounded up to a power of two
    VALUE_DIM: Any  # the same of values
    COPY: Any  # elements that a copying CTA has in flight
    POLL_WIDTH: Any  # signals polled at a time


class TaskAt(NamedTuple):
    """A task: number `within` of its round. Tasks of a round are tiles of dq, then blocks of keys of each rank, then
    the reductions of blocks of keys."""

    round_index: Any
    within: Any
    batch: Any
    kv_head: Any
    begin: Any  # the panels of the round have keys begin..until-1 of every rank's unit
    until: Any


@triton.jit
def value_dim_of(call):
    """The number of columns of values."""
    if call.value_dim is None:
        return call.dim
    else:
        return call.value_dim


@triton.jit
def task_at(comm, call, index):
    """The task that entry `index` of the schedule names."""
    entry = tl.load(call.schedule + index)
    tasks = call.heads // call.kv_heads * call.blocks + comm.WORLD_SIZE * call.tiles
    if comm.WORLD_SIZE > 1:
        tasks += comm.WORLD_SIZE // comm.RANKS_PER_NODE * call.tiles
    round_index = (entry // tasks).to(tl.int32)
    unit = round_index // call.rounds.parts
    begin = round_index % call.rounds.parts * call.rounds.part_rows
    until = tl.minimum(begin + call.rounds.part_rows, call.mask.length)
    return TaskAt(
        round_index, (entry % tasks).to(tl.int32), unit // call.kv_heads, unit % call.kv_heads, begin, until
    )  # fmt: skip
