"""The plan of an all_gather_matmul call: tiles, chunks, CTAs per role, and which kernel runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mkernel.runtime import hopper, planning
from mkernel.runtime.config import Config, Settings
from mkernel.runtime.group import Group
from mkernel.runtime.matmul import RhsLayout
from mkernel.runtime.operands import describable, has_descriptors, matmul_precision


@dataclass(frozen=True)
class RowAccess:
    """How kernels access the rows that are gathered."""

    descriptors: bool  # the device has TMA
    staged: bool  # the rank's own rows are copied into the workspace and read there
    row_stride: int  # of rows in the workspace
    flat: bool  # chunks are contiguous, both in a and in the workspace
    direct: bool  # the network reads a directly, without staging

    @staticmethod
    def of(group: Group, a: torch.Tensor) -> RowAccess:
        k, element = a.shape[1], a.element_size()
        descriptors = has_descriptors(group.device)
        staged = not describable(a) if descriptors else a.stride(1) != 1
        row_stride = -(-k * element // 16) * 16 // element
        flat = a.is_contiguous() and row_stride == k
        direct = group.nodes > 1 and flat and not staged and group.heap.find(a) is not None
        return RowAccess(descriptors, staged, row_stride, flat, direct)

    def reasons(self, nodes: int) -> list[str]:
        reasons = []
        if self.staged:
            reasons.append("a has no contiguous, 16-byte aligned rows: it is copied into the workspace first")
        if nodes > 1:
            where = "is staged in the workspace for the network (mk.empty would save that)"
            if self.direct:
                where = "is in the symmetric heap: the network reads it directly"
            reasons.append(f"a {where}")
        return reasons


@dataclass(frozen=True)
class Access:
    """How the kernel accesses the tensors of a call."""

    rows: RowAccess
    right: RhsLayout
    out_uses_tma: bool

    @staticmethod
    def of(group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Access:
        rows = RowAccess.of(group, a)
        return Access(rows, RhsLayout.of(b, rows.descriptors), rows.descriptors and describable(out))

    def reasons(self, nodes: int) -> list[str]:
        uses_tma = dict(b=self.right.uses_tma, out=self.out_uses_tma)
        return [*planning.reasons_of_access(self.rows.descriptors, uses_tma), *self.rows.reasons(nodes)]


@dataclass(frozen=True, eq=False)
class Plan:
    """What a call will do, and why. `str(plan)` explains it."""

    config: Settings
    access: Access
    chunks: int
    precision: str
    hopper: bool  # runs the Hopper kernel (hopper.py)
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
    """Decide how to run a call. The decision depends only on shapes, strides, alignment and the group."""
    m, n = a.shape[0], b.shape[1]
    access = Access.of(group, a, b, out)
    on_hopper = (
        suits_hopper(group, m, a.dtype, config)
        and n > 128
        and access.right.uses_tma
        and access.out_uses_tma
        and not (access.rows.staged or return_gathered)
    )
    settings, reasons = (_on_hopper if on_hopper else _portable)(group, a, n, access, config)
    planning.check_tile(settings, a.dtype, access.rows.descriptors and access.right.uses_tma)
    planning.check(
        settings,
        max_ctas=group.world.launcher.ctas(group.world_rank),
        least_send=1 if group.nodes > 1 or access.rows.staged else 0,
        least_intra=1 if group.gpus_per_node > 1 and not on_hopper else 0,
    )
    return Plan(
        config=settings,
        access=access,
        chunks=math.ceil(m / settings.chunk_rows),
        precision=matmul_precision(a.dtype),
        hopper=on_hopper,
        reasons=(*access.reasons(group.nodes), *reasons),
    )


def _on_hopper(
    group: Group, a: torch.Tensor, n: int, access: Access, config: Config | None
) -> tuple[Settings, list[str]]:
    """Settings of the Hopper kernel (hopper.py). No CTA is reserved for copying: each has a warp for it."""
    pick = planning.chooser(config)
    defaults = planning.default_tiles(group.device, a.dtype, n, True)
    tiles = math.ceil(a.shape[0] / hopper.TILE_M) * math.ceil(n / hopper.TILE_N) * group.size
    settings = Settings(
        tile_m=hopper.TILE_M, tile_n=hopper.TILE_N, tile_k=pick("tile_k", defaults.tile_k),
        group_m=pick("group_m", defaults.group_m), stages=pick("stages", hopper.STAGES),
        warps=pick("warps", hopper.WARPS),
        ctas=pick("ctas", planning.fewest_ctas(tiles, group.world.launcher.ctas(group.world_rank))),
        send_ctas=pick("send_ctas", 0), intra_ctas=0, join_tiles=0, chunk_rows=chunk_rows(group, a, config),
        copy_bytes=pick("copy_bytes", defaults.copy_bytes),
    )  # fmt: skip
    return settings, ["Hopper kernel: one warp of every CTA copies while the others multiply"]


def _portable(
    group: Group, a: torch.Tensor, n: int, access: Access, config: Config | None
) -> tuple[Settings, list[str]]:
    """Settings of the Triton kernel (kernel.py): how many CTAs copy, and how many tiles they compute afterwards."""
    m, k = a.shape
    nodes, gpus, element = group.nodes, group.gpus_per_node, a.element_size()
    pick = planning.chooser(config)
    defaults = planning.default_tiles(group.device, a.dtype, n, access.right.uses_tma and access.out_uses_tma)
    tile_m, tile_n = pick("tile_m", defaults.tile_m), pick("tile_n", defaults.tile_n)
    most = group.world.launcher.ctas(group.world_rank)
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n) * group.size
    tile_seconds = 2 * tile_m * tile_n * k / planning.CTA_RATE[a.dtype]
    compute_seconds = tiles * tile_seconds / most
    pushed = (gpus - 1) * nodes * m * k * element
    link = group.world.links.nvlink * 1e9 if group.world.links.nvlink else planning.NVLINK_RATE
    network = group.world.links.network * 1e9 if group.world.links.network else planning.NETWORK_RATE
    network_seconds = (nodes - 1) * m * k * element / network

    send_ctas = pick("send_ctas", 1 if nodes > 1 or access.rows.staged else 0)
    # copies should take no longer than the slower of compute and network
    longest = max(compute_seconds, network_seconds)
    rate = planning.push_rate(gpus - 1)
    intra_ctas = pick("intra_ctas", planning.copiers_for(pushed, rate, longest, link, most) if gpus > 1 else 0)
    helpers = send_ctas + intra_ctas
    ctas = pick("ctas", min(most, max(tiles, 1) + helpers) if helpers else planning.fewest_ctas(tiles, most))
    push_seconds = pushed / min(rate * max(intra_ctas, 1), link)
    on_gpu = group.device.type == "cuda"
    done = math.ceil(max(push_seconds, network_seconds) / max(tile_seconds, 1e-9)) + 1 if on_gpu else 1
    # CTAs that forward rows from other nodes are busy to the end if the network takes longer than the compute
    joining = helpers > 0 and not access.rows.staged and (network_seconds <= compute_seconds or not on_gpu)
    join_tiles = pick("join_tiles", planning.join_tiles_for(tiles, ctas, helpers, done) if joining else 0)
    settings = Settings(
        tile_m=tile_m, tile_n=tile_n, tile_k=pick("tile_k", defaults.tile_k),
        group_m=pick("group_m", defaults.group_m), stages=pick("stages", defaults.stages),
        warps=pick("warps", defaults.warps), ctas=ctas, send_ctas=send_ctas, intra_ctas=intra_ctas,
        join_tiles=min(join_tiles, tiles), chunk_rows=chunk_rows(group, a, config),
        copy_bytes=pick("copy_bytes", defaults.copy_bytes),
    )  # fmt: skip
    reasons = [
        f"{intra_ctas} CTAs push {pushed} bytes over NVLink while {tiles} tiles are computed: "
        f"estimated {push_seconds * 1e3:.3g} ms and {compute_seconds * 1e3:.3g} ms"
    ]
    if nodes > 1:
        reasons.append(f"estimated {network_seconds * 1e3:.3g} ms for the network")
    return settings, reasons


def chunk_rows(group: Group, a: torch.Tensor, config: Config | None) -> int:
    """Rows per chunk. Depends only on what is the same on every rank, so that all ranks use the same value."""
    given = config or Config()
    if given.chunk_rows is not None:
        return given.chunk_rows
    if suits_hopper(group, a.shape[0], a.dtype, config):
        return 16  # every CTA pushes, so with small chunks rows arrive in order
    tile_m = given.tile_m or planning.default_tiles(group.device, a.dtype, 0, True).tile_m
    return planning.rows_per_chunk(a.shape[0], tile_m)


def suits_hopper(group: Group, m: int, dtype: torch.dtype, config: Config | None) -> bool:
    """Whether such calls can run the Hopper kernel, judging only by what is the same on every rank."""
    return hopper.suits(group, m, dtype, config, free={"ctas", "chunk_rows", "group_m"})
