"""The plan of an all_gather_matmul call: tiles, chunks, CTAs per role, and which kernel runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch

from mkernel.ops.all_gather_matmul.order import MANY_NODES
from mkernel.runtime import hopper, planning
from mkernel.runtime.config import Config, Settings
from mkernel.runtime.group import Group
from mkernel.runtime.matmul import RhsLayout
from mkernel.runtime.operands import BYTES, describable, has_descriptors, matmul_precision
from mkernel.runtime.scaling import Scaling, check_tile_k

FEW_GATHERED = 256  # rows of all ranks
LINE = 128  # bytes of a cache line: rows with scales begin with one, so that a block of a row is no more lines


def as_gathered(a: torch.Tensor, scaling: Scaling | None) -> torch.Tensor:
    """a, in the dtype in which its rows are gathered. Where the kernel quantizes them, a tensor without memory."""
    if scaling is None or scaling.quantizes is None:
        return a
    return torch.empty(a.shape, dtype=scaling.quantizes, device="meta")


@dataclass(frozen=True)
class RowAccess:
    """How kernels access the rows that are gathered."""

    descriptors: bool  # the device has TMA
    staged: bool  # the rank's own rows are copied into the workspace and read there
    row_stride: int  # of rows in the workspace
    flat: bool  # chunks are contiguous, both in a and in the workspace
    direct: bool  # the network reads a directly, without staging
    scale_at: int = 0  # where the scales of a row of fp8 begin in a row of the workspace, in bytes
    quantized: bool = False  # the rank's own rows are quantized on their way into the workspace

    @staticmethod
    def of(group: Group, a: torch.Tensor, scaling: Scaling | None = None) -> RowAccess:
        k, element = a.shape[1], as_gathered(a, scaling).element_size()
        descriptors = has_descriptors(group.target)
        staged = not describable(a) if descriptors else a.stride(1) != 1
        row_stride = -(-k * element // 16) * 16 // element
        if scaling is not None:
            pitch = -(-(row_stride + 4 * scaling.count) // LINE) * LINE
            quantized = scaling.quantizes is not None
            return RowAccess(descriptors, staged or quantized, pitch, False, False, row_stride, quantized)
        flat = a.is_contiguous() and row_stride == k
        direct = group.nodes > 1 and flat and not staged and group.heap.find(a) is not None
        return RowAccess(descriptors, staged, row_stride, flat, direct)

    def reasons(self, nodes: int) -> list[str]:
        reasons = []
        if self.quantized:
            reasons.append("a is quantized by the kernel, into the workspace")
        elif self.staged:
            reasons.append("a has no contiguous, 16-byte aligned rows: it is copied into the workspace first")
        if nodes > 1:
            where = "is staged in the workspace for the network (mk.empty would save that)"
            if self.scale_at:
                where = "is staged in the workspace for the network, with its scales"
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
    def of(
        group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scaling: Scaling | None = None
    ) -> Access:  # fmt: skip
        rows = RowAccess.of(group, a, scaling)
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
    few_rows: bool = False  # runs the kernel for few rows (few_rows.py)
    rows_use_tma: bool = False  # it reads rows through a descriptor
    op: str = "all_gather_matmul"  # the public function

    def __str__(self) -> str:
        c = self.config
        roles = f"{c.team_ctas} for each tile" if self.few_rows else planning.roles_of(c)
        head = (
            f"{self.op}: tiles {c.tile_m}x{c.tile_n}x{c.tile_k}, {c.ctas} CTAs ({roles}), "
            f"{self.chunks} chunks of {c.chunk_rows} rows per rank"
        )
        return "\n".join([head, *(f"- {reason}" for reason in self.reasons)])


def plan(
    group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, return_gathered: bool, config: Config | None,
    scaling: Scaling | None = None,
) -> Plan:  # fmt: skip
    """Decide how to run a call. The decision depends only on shapes, strides, alignment and the group."""
    access = Access.of(group, a, b, out, scaling)
    decided = _plan(group, as_gathered(a, scaling), b, out, return_gathered, config, access, scaling)
    if scaling is None:
        return decided
    check_tile_k(scaling.blockwise, decided.config.tile_k)
    return replace(decided, reasons=(f"fp8: {scaling}", *decided.reasons))


def _plan(
    group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, return_gathered: bool, config: Config | None,
    access: Access, scaling: Scaling | None,
) -> Plan:  # fmt: skip
    """`plan`, but for what it says about the scales."""
    m, n = a.shape[0], b.shape[1]
    few = None
    if not (return_gathered or access.rows.quantized):
        few = _few_rows(group, a, n, access, config, scaling is not None and not scaling.fast)
    if few is not None:
        return few
    on_hopper = suits_hopper(group, m, a.dtype, config)
    on_hopper &= access.right.uses_tma and access.out_uses_tma and not access.rows.staged
    if a.dtype.itemsize == 1:
        on_hopper &= access.right.transposed and out.dtype.itemsize == 2 and not return_gathered
    else:
        on_hopper &= n > 128
        on_hopper &= not return_gathered or a.shape[1] * a.element_size() % BYTES == 0  # TMA can write gathered rows
    settings, reasons = (_on_hopper if on_hopper else _portable)(group, a, n, access, config)
    if on_hopper and return_gathered:
        reasons.append("another one stores the gathered rows, from shared memory")
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


def _few_rows(
    group: Group, a: torch.Tensor, n: int, access: Access, config: Config | None, promoted: bool
) -> Plan | None:  # fmt: skip
    """The plan of a call that takes the kernel for few rows (few_rows.py); None for other calls."""
    (m, k), size, given = a.shape, group.size, config or Config()
    most = group.world.launcher.ctas(group.world_rank)
    if group.nodes > 1 or not m * n:
        return None
    rows_use_tma = access.rows.descriptors and (size > 1 or not access.rows.staged)
    tile = None
    if given.team_ctas is None:
        if not (rows_use_tma and access.right.uses_tma and _is_plain(config)):
            return None
        if size > 1 and not gathers_few_rows(group, m, a.dtype, config):
            return None
        if a.dtype.itemsize == 1 and not access.right.transposed:  # tensor cores read fp8 along k only
            return None
        tile = planning.few_rows(group.target, a.dtype, size * m, n, k, most, promoted)
        if tile is None and size == 1:
            return None
    defaults = planning.default_tiles(group.target, a.dtype, n, rows_use_tma and access.right.uses_tma)
    tile = tile or planning.FewRows(
        defaults.tile_m, min(defaults.tile_n, 128), defaults.tile_k, defaults.stages, defaults.warps, 1
    )
    pick = planning.chooser(config)
    tile_m, tile_n = pick("tile_m", tile.tile_m), pick("tile_n", tile.tile_n)
    tiles = math.ceil(size * m / tile_m) * math.ceil(n / tile_n)
    team = planning.largest_team(min(pick("team_ctas", tile.team), tile_m, pick("ctas", most) // tiles))
    rows_in_chunk = chunk_rows(group, a, config)
    chunks = math.ceil(m / rows_in_chunk)
    # all CTAs push, so there may be more of them than tiles
    wanted = max(tiles * team, chunks if size > 1 else 1)
    settings = Settings(
        tile_m=tile_m, tile_n=tile_n, tile_k=pick("tile_k", tile.tile_k), group_m=pick("group_m", defaults.group_m),
        stages=pick("stages", tile.stages), warps=pick("warps", tile.warps),
        ctas=planning.ctas_of_teams(given.ctas, wanted, team, most), send_ctas=0, intra_ctas=0, join_tiles=0,
        chunk_rows=rows_in_chunk, copy_bytes=pick("copy_bytes", min(defaults.copy_bytes, 16384)),
        team_ctas=team,
    )  # fmt: skip
    planning.check_tile(settings, a.dtype, rows_use_tma and access.right.uses_tma)
    planning.check(settings, max_ctas=most, least_send=0, least_intra=0)
    reason = "few rows: a tile covers the rows of all ranks, so that b is read once"
    return Plan(
        config=settings, access=access, chunks=chunks, precision=matmul_precision(a.dtype), hopper=False,
        reasons=(*access.reasons(group.nodes), reason), few_rows=True, rows_use_tma=rows_use_tma,
    )  # fmt: skip


def _is_plain(config: Config | None) -> bool:
    """Does a configuration leave tiles and CTAs open?"""
    given = config or Config()
    return all(getattr(given, field.name) is None for field in fields(given) if field.name != "chunk_rows")


def gathers_few_rows(group: Group, m: int, dtype: torch.dtype, config: Config | None) -> bool:
    """Whether calls of several ranks usually take the kernel for few rows, judging only by what is the same on every
    rank."""
    return (
        group.size > 1
        and group.nodes == 1
        and group.target.type == "cuda"
        and has_descriptors(group.target)
        and dtype.itemsize <= 2
        and group.size * m <= FEW_GATHERED
        and _is_plain(config)
    )


def _on_hopper(
    group: Group, a: torch.Tensor, n: int, access: Access, config: Config | None
) -> tuple[Settings, list[str]]:
    """Settings of the Hopper kernel (hopper.py). No CTA is reserved for copying: each has a warp for it."""
    pick = planning.chooser(config)
    defaults = planning.default_tiles(group.target, a.dtype, n, True)
    tile_m, tile_n, tile_k = hopper.TILE_M, hopper.TILE_N, hopper.TILE_K
    if a.dtype.itemsize == 1:
        tile_m, tile_n, tile_k = hopper.FP8_TILE
    tiles = math.ceil(a.shape[0] / tile_m) * math.ceil(n / tile_n) * group.size
    settings = Settings(
        tile_m=tile_m, tile_n=tile_n, tile_k=tile_k,
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
    defaults = planning.default_tiles(group.target, a.dtype, n, access.right.uses_tma and access.out_uses_tma)
    tile_m, tile_n = pick("tile_m", defaults.tile_m), pick("tile_n", defaults.tile_n)
    most = group.world.launcher.ctas(group.world_rank)
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n) * group.size
    tile_seconds = 2 * tile_m * tile_n * k / planning.CTA_RATE[a.dtype]
    compute_seconds = tiles * tile_seconds / most
    pushed = (gpus - 1) * nodes * m * k * element
    link = group.world.links.nvlink * 1e9 if group.world.links.nvlink else planning.NVLINK_RATE
    network = group.world.links.network * 1e9 if group.world.links.network else planning.NETWORK_RATE
    network_seconds = (nodes - 1) * m * k * element / network

    sending = 1 if nodes > 1 or access.rows.staged else 0
    if access.rows.quantized:
        sending = planning.quantizers_for(m * k, math.ceil(m / chunk_rows(group, a, config)), compute_seconds, most)
    send_ctas = pick("send_ctas", sending)
    # copies should take no longer than the slower of compute and network
    longest = max(compute_seconds, network_seconds)
    rate = planning.push_rate(gpus - 1)
    intra_ctas = pick("intra_ctas", planning.copiers_for(pushed, rate, longest, link, most) if gpus > 1 else 0)
    helpers = send_ctas + intra_ctas
    ctas = pick("ctas", min(most, max(tiles, 1) + helpers) if helpers else planning.fewest_ctas(tiles, most))
    push_seconds = pushed / min(rate * max(intra_ctas, 1), link)
    on_gpu = group.target.type == "cuda"
    done = math.ceil(max(push_seconds, network_seconds) / max(tile_seconds, 1e-9)) + 1 if on_gpu else 1
    # CTAs that forward rows from other nodes are busy to the end if the network takes longer than the compute
    joining = helpers > 0 and (network_seconds <= compute_seconds or not on_gpu)
    join_tiles = pick("join_tiles", planning.join_tiles_for(tiles, ctas, helpers, done) if joining else 0)
    if access.rows.staged:  # own rows come from the workspace, too: there are no tiles that wait for nothing
        join_tiles = 0
    settings = Settings(
        tile_m=tile_m, tile_n=tile_n, tile_k=pick("tile_k", defaults.tile_k),
        group_m=pick("group_m", defaults.group_m), stages=pick("stages", defaults.stages),
        warps=pick("warps", defaults.warps), ctas=ctas, send_ctas=send_ctas, intra_ctas=intra_ctas,
        join_tiles=min(join_tiles, tiles), chunk_rows=chunk_rows(group, a, config),
        copy_bytes=pick("copy_bytes", defaults.copy_bytes),
    )  # fmt: skip
    reasons = [
        f"{pushed} bytes are pushed over NVLink by {planning.count_of_ctas(intra_ctas)}: estimated "
        f"{push_seconds * 1e3:.3g} ms, during {compute_seconds * 1e3:.3g} ms for {tiles} tiles"
    ]
    if nodes > 1:
        reasons.append(f"the network takes {network_seconds * 1e3:.3g} ms (estimated)")
    if nodes >= MANY_NODES.value:
        reasons.append(
            "many nodes: the chunks of all nodes are sent, forwarded and multiplied in turn, as they arrive: nobody "
            "waits for the last chunk of a node"
        )
    return settings, reasons


def chunk_rows(group: Group, a: torch.Tensor, config: Config | None) -> int:
    """Rows per chunk. Depends only on what is the same on every rank, so that all ranks use the same value: also where
    the kernels of some of them quantize their rows."""
    given = config or Config()
    if given.chunk_rows is not None:
        return given.chunk_rows
    m = a.shape[0]
    if gathers_few_rows(group, m, a.dtype, config):
        return max(-(-m // 64), 1)  # every CTA pushes a few of them
    if suits_hopper(group, m, a.dtype, config):
        # every CTA pushes, so with small chunks rows arrive in order; and the first ones early, if each has several
        return min(max(m // 256, 4), 32 // a.element_size())
    tile_m = given.tile_m or planning.default_tiles(group.target, a.dtype, 0, True).tile_m
    return planning.rows_per_chunk(m, tile_m)


def suits_hopper(group: Group, m: int, dtype: torch.dtype, config: Config | None) -> bool:
    """Whether such calls can run a Hopper kernel, that of their dtype, judging only by what is the same on every
    rank."""
    free = {"ctas", "chunk_rows", "group_m"}
    return hopper.suits(group, m, dtype, config, free, itemsize=min(dtype.itemsize, 2))
