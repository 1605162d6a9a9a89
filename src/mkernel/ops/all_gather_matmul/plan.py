"""How a call of all_gather_matmul is carried out: tiles, chunks, CTAs of each role, and which kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mkernel.runtime import hopper, planning
from mkernel.runtime.config import Config, Settings
from mkernel.runtime.group import Group
from mkernel.runtime.matmul import RhsLayout
from mkernel.runtime.operands import describable, has_descriptors, matmul_precision


@dataclass(frozen=True, eq=False)
class Plan:
    """What a call will do, and why. `str(plan)` explains it."""

    config: Settings
    chunks: int
    row_stride: int
    descriptors: bool  # rows of a are read through tensor descriptors
    staged: bool  # the rank's own rows are read through the workspace
    right: RhsLayout
    out_uses_tma: bool
    flat: bool  # chunks are contiguous, here and in the workspace
    direct: bool  # the network reads a where it is
    precision: str
    hopper: bool  # runs the kernel in hopper.py
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        c = self.config
        head = (
            f"all_gather_matmul: tiles {c.tile_m}x{c.tile_n}x{c.tile_k}, {c.ctas} CTAs "
            f"({c.send_ctas} send, {c.intra_ctas} intra, which compute {c.join_tiles} tiles each when they are done), "
            f"{self.chunks} chunks of {c.chunk_rows} rows per rank"
        )
        return "\n".join([head, *(f"- {reason}" for reason in self.reasons)])


def plan(
    group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, return_gathered: bool, config: Config | None
) -> Plan:
    """Decide how to run a call. Depends only on shapes, strides, alignment and the group."""
    m, k = a.shape
    n = b.shape[1]
    nodes, gpus = group.nodes, group.gpus_per_node
    element = a.element_size()
    reasons = []

    descriptors = has_descriptors(group.device)
    staged = not describable(a) if descriptors else a.stride(1) != 1
    right = RhsLayout.of(b, descriptors)
    out_uses_tma = descriptors and describable(out)
    row_stride = -(-k * element // 16) * 16 // element
    flat = a.is_contiguous() and row_stride == k
    direct = nodes > 1 and flat and not staged and group.heap.find(a) is not None
    if not descriptors:
        reasons.append("the device has no tensor descriptors (TMA): operands are read through pointers")
    else:
        for name, good in (("b", right.uses_tma), ("out", out_uses_tma)):
            if not good:
                reasons.append(f"{name} has no contiguous, 16-byte aligned rows: it is accessed through pointers")
    if staged:
        reasons.append("a has no contiguous, 16-byte aligned rows: it is copied into the workspace first")
    if nodes > 1:
        how = "lies in the symmetric heap: the network reads it where it is"
        reasons.append(
            f"a {how if direct else 'is staged in the workspace for the network (mk.empty would save that)'}"
        )

    tiles_of = planning.default_tiles(group.device, a.dtype, n, right.uses_tma and out_uses_tma)
    pick = planning.chooser(config)
    tile_m = pick("tile_m", tiles_of.tile_m)
    tile_n = pick("tile_n", tiles_of.tile_n)
    most = group.world.ctas(group.world_rank)
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n) * group.size
    tile_seconds = 2 * tile_m * tile_n * k / planning.CTA_RATE[a.dtype]
    compute_seconds = tiles * tile_seconds / most
    pushed = (gpus - 1) * nodes * m * k * element
    send_ctas = pick("send_ctas", 1 if nodes > 1 or staged else 0)
    link = group.world.links.nvlink * 1e9 if group.world.links.nvlink else planning.NVLINK_RATE
    network = group.world.links.network * 1e9 if group.world.links.network else planning.NETWORK_RATE
    network_seconds = (nodes - 1) * m * k * element / network
    # what is there to hide the copies behind
    longest = max(compute_seconds, network_seconds)
    rate = planning.push_rate(gpus - 1)
    intra_ctas = pick("intra_ctas", planning.copiers_for(pushed, rate, longest, link, most) if gpus > 1 else 0)
    helpers = send_ctas + intra_ctas
    ctas = pick("ctas", min(most, max(tiles, 1) + helpers) if helpers else planning.fewest_ctas(tiles, most))
    push_seconds = pushed / min(rate * max(intra_ctas, 1), link)
    busy_seconds = max(push_seconds, network_seconds)
    done = math.ceil(busy_seconds / max(tile_seconds, 1e-9)) + 1 if group.device.type == "cuda" else 1
    # those who pass on what the network brings are busy to the end if it takes longer than the compute
    joining = helpers > 0 and not staged and (network_seconds <= compute_seconds or group.device.type != "cuda")
    join_tiles = pick("join_tiles", planning.join_tiles_for(tiles, ctas, helpers, done) if joining else 0)
    reasons.append(
        f"{intra_ctas} CTAs push {pushed} bytes over NVLink while {tiles} tiles are computed: "
        f"estimated {push_seconds * 1e3:.3g} ms and {compute_seconds * 1e3:.3g} ms"
    )
    if nodes > 1:
        reasons.append(f"estimated {network_seconds * 1e3:.3g} ms for the network")
    on_hopper = (
        suits_hopper(group, m, a.dtype, config)
        and n > 128
        and right.uses_tma
        and out_uses_tma
        and not (staged or return_gathered)
    )
    if on_hopper:
        # no CTA only copies: each has a warp for it
        tile_m, tile_n, intra_ctas, join_tiles = hopper.TILE_M, hopper.TILE_N, 0, 0
        tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n) * group.size
        ctas = pick("ctas", planning.fewest_ctas(tiles, most))
        reasons[-1:] = ["the kernel for Hopper: a warp of every CTA copies while the others multiply"]
    resolved = Settings(
        tile_m=tile_m, tile_n=tile_n, tile_k=pick("tile_k", tiles_of.tile_k), group_m=pick("group_m", tiles_of.group_m),
        stages=pick("stages", hopper.STAGES if on_hopper else tiles_of.stages),
        warps=pick("warps", hopper.WARPS if on_hopper else tiles_of.warps),
        ctas=ctas, send_ctas=send_ctas, intra_ctas=intra_ctas, join_tiles=min(join_tiles, tiles),
        chunk_rows=chunk_rows(group, a, config),
        copy_bytes=pick("copy_bytes", tiles_of.copy_bytes),
    )  # fmt: skip
    planning.check_tile(resolved, a.dtype, descriptors and right.uses_tma)
    planning.check(
        resolved,
        max_ctas=most,
        least_send=1 if nodes > 1 or staged else 0,
        least_intra=1 if gpus > 1 and not on_hopper else 0,
    )
    return Plan(
        config=resolved,
        chunks=math.ceil(m / resolved.chunk_rows),
        row_stride=row_stride,
        descriptors=descriptors,
        staged=staged,
        right=right,
        out_uses_tma=out_uses_tma,
        flat=flat,
        direct=direct,
        precision=matmul_precision(a.dtype),
        hopper=on_hopper,
        reasons=tuple(reasons),
    )


def chunk_rows(group: Group, a: torch.Tensor, config: Config | None) -> int:
    """Rows of a chunk: from what is the same on every rank, so that all ranks take the same."""
    given = config or Config()
    if given.chunk_rows is not None:
        return given.chunk_rows
    if suits_hopper(group, a.shape[0], a.dtype, config):
        return 16  # every CTA pushes, so small chunks arrive in order
    tile_m = given.tile_m or planning.default_tiles(group.device, a.dtype, 0, True).tile_m
    return planning.rows_per_chunk(a.shape[0], tile_m)


def suits_hopper(group: Group, m: int, dtype: torch.dtype, config: Config | None) -> bool:
    """Is there another kernel for such calls, as far as all ranks know alike?"""
    return hopper.suits(group, m, dtype, config, free={"ctas", "chunk_rows", "group_m"})
