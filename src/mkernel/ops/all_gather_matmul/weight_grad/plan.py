"""The plan of an all_gather_matmul_weight_grad call: tiles, chunks, CTAs per role, and which tiles are computed in
passes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mkernel.ops.all_gather_matmul.plan import RowAccess
from mkernel.runtime import hopper, planning
from mkernel.runtime.config import Config, Settings
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group
from mkernel.runtime.operands import describable, matmul_precision

OP = "all_gather_matmul_weight_grad"
MOST_PASSES = 12
MOST_PARTIALS = 132 * 8 * 128 * 256  # elements of partials: 8 tiles for each of 132 CTAs, 132 MiB
# In the kernel for Hopper every CTA pushes a chunk at a time, and the chunks of all CTAs arrive together. So they are
# small: with 128 rows, a large call would have one chunk per CTA, and nothing would arrive before everything does.
HOPPER_CHUNK = 16
# Bytes/s at which a CTA stores and loads its partials: its share of an H200's memory bandwidth. Not measured.
PARTIAL_RATE = 4.8e12 / 132


@dataclass(frozen=True)
class Access:
    """How the kernel accesses the tensors of a call."""

    rows: RowAccess
    dy_uses_tma: bool
    out_uses_tma: bool
    transposed: bool  # tiles are tiles of out.t(), whose rows are contiguous

    @staticmethod
    def of(group: Group, a: torch.Tensor, dy: torch.Tensor, out: torch.Tensor) -> Access:
        rows = RowAccess.of(group, a)
        transposed = out.stride(0) < out.stride(1)
        if rows.descriptors and describable(out) != describable(out.t()):
            transposed = describable(out.t())
        return Access(
            rows=rows,
            dy_uses_tma=rows.descriptors and describable(dy),
            out_uses_tma=rows.descriptors and describable(out.t() if transposed else out),
            transposed=transposed,
        )

    def reasons(self, nodes: int) -> list[str]:
        uses_tma = dict(dy=self.dy_uses_tma, out=self.out_uses_tma)
        reasons = planning.reasons_of_access(self.rows.descriptors, uses_tma)
        if self.transposed:
            reasons.append("out is column-major: the tiles are those of its transpose")
        return [*reasons, *self.rows.reasons(nodes)]


@dataclass(frozen=True, eq=False)
class Plan:
    """What a call will do, and why. `str(plan)` explains it."""

    config: Settings
    access: Access
    chunks: int
    precision: str
    hopper: bool  # runs the kernel for Hopper (hopper.py)
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        c = self.config
        head = (
            f"{OP}: tiles {c.tile_m}x{c.tile_n}x{c.tile_k}, {c.ctas} CTAs ({planning.roles_of(c)}), "
            f"{self.chunks} chunks of {c.chunk_rows} rows per rank"
        )
        if c.passes > 1:
            head += f"; each CTA computes its first {c.held_tiles} tiles in {c.passes} passes"
        return "\n".join([head, *(f"- {reason}" for reason in self.reasons)])


@dataclass(frozen=True)
class Problem:
    """The times of a call, in seconds, and what they depend on."""

    ranks: int
    tiles: int
    tile_elements: int
    tile_seconds: float  # to compute a tile
    partial_seconds: float  # to store its partial and load it again
    pushed: int  # bytes over NVLink
    push_rate: float  # bytes/s of one CTA
    link: float  # bytes/s of the link
    network_seconds: float

    def arrived(self, copiers: int) -> float:
        """When the last rows arrive."""
        pushed = self.pushed / min(self.push_rate * copiers, self.link) if copiers else 0.0
        return max(pushed, self.network_seconds)


@dataclass(frozen=True)
class Schedule:
    """Who computes what: the result of a search. seconds: the estimated duration."""

    seconds: float
    copiers: int
    passes: int
    held: int
    join_tiles: int


def plan(group: Group, a: torch.Tensor, dy: torch.Tensor, out: torch.Tensor, config: Config | None) -> Plan:
    """Decide how to run a call. The decision depends only on shapes, strides, alignment and the group."""
    access = Access.of(group, a, dy, out)
    uses_tma = access.rows.descriptors and access.dy_uses_tma
    on_hopper = _suits_hopper(group, a, dy.shape[1], access, config)
    settings, reasons = (_on_hopper if on_hopper else _settings)(group, a, dy.shape[1], access, config)
    planning.check_tile(settings, a.dtype, uses_tma)
    planning.check(
        settings,
        max_ctas=group.world.launcher.ctas(group.world_rank),
        least_send=1 if group.nodes > 1 or access.rows.staged else 0,
        least_intra=1 if group.gpus_per_node > 1 and not on_hopper else 0,
    )
    return Plan(
        config=settings,
        access=access,
        chunks=math.ceil(a.shape[0] / settings.chunk_rows),
        precision=matmul_precision(a.dtype),
        hopper=on_hopper,
        reasons=(*access.reasons(group.nodes), *reasons),
    )


def _suits_hopper(group: Group, a: torch.Tensor, n: int, access: Access, config: Config | None) -> bool:
    """Can the kernel for Hopper run the call?"""
    columns = a.shape[1] if access.transposed else n
    return (
        _suits_sizes(group, a, config)
        and columns > 128
        and not access.rows.staged
        and access.dy_uses_tma
        and access.out_uses_tma
        and a.shape[0] % max(chunk_rows(group, a, config), hopper.TILE_K) == 0
    )


def _suits_sizes(group: Group, a: torch.Tensor, config: Config | None) -> bool:
    """Whether such calls can run the kernel for Hopper, judging only by what is the same on every rank."""
    free = {"ctas", "chunk_rows", "group_m", "passes", "held_tiles"}
    return hopper.suits(group, a.shape[0], a.dtype, config, free=free)


def _on_hopper(
    group: Group, a: torch.Tensor, n: int, access: Access, config: Config | None
) -> tuple[Settings, list[str]]:
    """The settings of the kernel for Hopper. No CTA is reserved for copying."""
    k = a.shape[1]
    pick = planning.chooser(config)
    defaults = planning.default_tiles(group.target, a.dtype, n, True)
    rows, columns = (n, k) if access.transposed else (k, n)
    tiles = math.ceil(rows / hopper.TILE_M) * math.ceil(columns / hopper.TILE_N)
    ctas = pick("ctas", planning.fewest_ctas(tiles, group.world.launcher.ctas(group.world_rank)))
    problem = _problem(group, a, tiles, hopper.TILE_M, hopper.TILE_N)
    passes, held = _passes_on_hopper(problem, ctas, config)
    chunk = chunk_rows(group, a, config)
    places = (group.size - 1) * (a.shape[0] // max(chunk, hopper.TILE_K))
    settings = Settings(
        tile_m=hopper.TILE_M, tile_n=hopper.TILE_N, tile_k=hopper.TILE_K, group_m=pick("group_m", defaults.group_m),
        stages=hopper.STAGES, warps=hopper.WARPS, ctas=ctas, send_ctas=0, intra_ctas=0, join_tiles=0, chunk_rows=chunk,
        copy_bytes=defaults.copy_bytes, passes=min(passes, places + 1), held_tiles=max(held, 1),
    )  # fmt: skip
    return settings, ["Hopper kernel: one warp of every CTA copies while the others multiply"]


def _passes_on_hopper(problem: Problem, ctas: int, config: Config | None) -> tuple[int, int]:
    """(passes, held tiles): the fastest by estimate, of those that the configuration leaves open."""
    given = config or Config()
    several = [given.passes] if given.passes is not None else range(1, MOST_PASSES + 1) if problem.ranks > 1 else [1]
    found = (
        (_seconds(problem, problem.arrived(ctas), math.ceil(problem.tiles / ctas), passes, held), passes, held)
        for passes in several
        for held in ([given.held_tiles] if given.held_tiles is not None else _held(problem, ctas))
    )
    return min(found)[1:]


def _settings(
    group: Group, a: torch.Tensor, n: int, access: Access, config: Config | None
) -> tuple[Settings, list[str]]:
    """The settings of a call, and the reasons for the number of CTAs that copy and of passes."""
    k = a.shape[1]
    pick = planning.chooser(config)
    rows, columns = (n, k) if access.transposed else (k, n)  # of the matrix that the tiles are tiles of
    uses_tma = access.rows.descriptors and access.dy_uses_tma and access.out_uses_tma
    defaults = planning.default_tiles(group.target, a.dtype, columns, uses_tma)
    tile_m, tile_n = pick("tile_m", defaults.tile_m), pick("tile_n", defaults.tile_n)
    tiles = math.ceil(rows / tile_m) * math.ceil(columns / tile_n)
    most = pick("ctas", group.world.launcher.ctas(group.world_rank))
    send_ctas = pick("send_ctas", 1 if group.nodes > 1 or access.rows.staged else 0)
    problem = _problem(group, a, tiles, tile_m, tile_n)
    on_gpu = group.target.type == "cuda"
    found = _search(problem, most, send_ctas, group.gpus_per_node > 1, config) if on_gpu else _simulated(group)
    intra_ctas = pick("intra_ctas", found.copiers)
    helpers = send_ctas + intra_ctas
    fewest = max(tiles - found.join_tiles * helpers, 1) + helpers if helpers else planning.fewest_ctas(tiles, most)
    chunk = chunk_rows(group, a, config)
    places = (group.size - 1) * math.ceil(a.shape[0] / chunk)
    settings = Settings(
        tile_m=tile_m, tile_n=tile_n, tile_k=pick("tile_k", defaults.tile_k),
        group_m=pick("group_m", defaults.group_m), stages=pick("stages", defaults.stages),
        warps=pick("warps", defaults.warps), ctas=pick("ctas", min(most, fewest)),
        send_ctas=send_ctas, intra_ctas=intra_ctas, join_tiles=min(pick("join_tiles", found.join_tiles), tiles),
        chunk_rows=chunk, copy_bytes=pick("copy_bytes", defaults.copy_bytes),
        passes=min(pick("passes", found.passes), places + 1), held_tiles=max(pick("held_tiles", found.held), 1),
    )  # fmt: skip
    if group.size == 1:
        return settings, []
    arrived, computed = problem.arrived(intra_ctas), tiles * problem.tile_seconds / max(settings.ctas - helpers, 1)
    return settings, [
        f"{problem.pushed} bytes are pushed over NVLink by {planning.count_of_ctas(intra_ctas)}: the last rows are "
        f"estimated to arrive after {arrived * 1e3:.3g} ms, and {tiles} tiles to take {computed * 1e3:.3g} ms"
    ]


def _problem(group: Group, a: torch.Tensor, tiles: int, tile_m: int, tile_n: int) -> Problem:
    m, k = a.shape
    nodes, gpus, links = group.nodes, group.gpus_per_node, group.world.links
    element = a.element_size()
    network = links.network * 1e9 if links.network else planning.NETWORK_RATE
    return Problem(
        ranks=group.size,
        tiles=tiles,
        tile_elements=tile_m * tile_n,
        tile_seconds=2 * tile_m * tile_n * m * group.size / planning.CTA_RATE[a.dtype],
        partial_seconds=2 * 4 * tile_m * tile_n / PARTIAL_RATE,
        pushed=(gpus - 1) * nodes * m * k * element,
        push_rate=planning.push_rate(gpus - 1),
        link=links.nvlink * 1e9 if links.nvlink else planning.NVLINK_RATE,
        network_seconds=(nodes - 1) * m * k * element / network,
    )


def _simulated(group: Group) -> Schedule:
    """What the simulator runs: a little of everything."""
    several = group.size > 1
    return Schedule(0.0, 1 if group.gpus_per_node > 1 else 0, 3 if several else 1, 2, 1 if several else 0)


def _search(problem: Problem, ctas: int, senders: int, copies: bool, config: Config | None) -> Schedule:
    """The fastest schedule, by estimate."""
    pick = planning.chooser(config)
    if problem.ranks == 1 or not problem.tiles:
        return Schedule(0.0, 1 if copies else 0, 1, 1, 0)
    useful = min(math.ceil(problem.link / problem.push_rate), max(ctas // 4, 1))
    found: Iterator[Schedule] = (
        _estimate(problem, ctas, senders, copiers, passes, held)
        for copiers in _left_open(pick("intra_ctas", 0), range(1, useful + 1) if copies else range(1))
        for passes in _left_open(pick("passes", 0), range(1, MOST_PASSES + 1))
        for held in (_left_open(pick("held_tiles", 0), _held(problem, ctas)) if passes > 1 else [1])
    )
    return min(found, key=lambda schedule: schedule.seconds)


def _held(problem: Problem, ctas: int) -> range:
    """How many tiles a CTA may compute in passes: no more than it has, and than MOST_PARTIALS allows."""
    most = min(MOST_PARTIALS // (ctas * problem.tile_elements), math.ceil(problem.tiles / max(ctas, 1)))
    return range(1, max(most, 1) + 1)


def _left_open(given: int, options: range) -> Sequence[int]:
    """Which options to try: the one that was given; all of them if that is none of them."""
    return [given] if given in options else options


def _estimate(problem: Problem, ctas: int, senders: int, copiers: int, passes: int, held: int) -> Schedule:
    """The duration of a schedule, if rows arrive at a steady rate. A compute CTA computes `held` tiles in passes, each
    of which begins when its rows have arrived, and the others afterwards."""
    helpers = senders + copiers
    compute = max(ctas - helpers, 1)
    arrived = problem.arrived(copiers)
    tile = problem.tile_seconds
    busy = math.ceil(arrived / tile)  # tiles that a CTA could have computed until then
    rounds = max(math.ceil(problem.tiles / (compute + helpers)), 1)
    while compute * rounds + helpers * max(rounds - busy, 0) < problem.tiles:
        rounds += 1
    seconds = _seconds(problem, arrived, rounds, passes, held)
    return Schedule(seconds, copiers, passes, min(held, rounds), max(rounds - busy, 0))


def _seconds(problem: Problem, arrived: float, rounds: int, passes: int, held: int) -> float:
    """How long a CTA takes for its tiles, `rounds` of them, the first `held` in passes."""
    held = min(held, rounds)
    own, tile = 1 / problem.ranks, problem.tile_seconds
    time = arrived + held * tile
    if passes > 1:
        time = held * own * tile
        for which in range(1, passes):
            time = max(time, arrived * which / (passes - 1))
            time += held * ((1 - own) / (passes - 1) * tile + problem.partial_seconds)
    return time + (rounds - held) * tile


def chunk_rows(group: Group, a: torch.Tensor, config: Config | None) -> int:
    """Rows per chunk, a multiple or a divisor of the rows of a step. Depends only on what is the same on every rank, so
    that all ranks use the same value."""
    given = config or Config()
    defaults = planning.default_tiles(group.target, a.dtype, 0, True)
    step = given.tile_k or defaults.tile_k
    if given.chunk_rows is not None and given.chunk_rows % step and step % given.chunk_rows:
        raise ArgumentError(
            f"config.chunk_rows is {given.chunk_rows}, but must be a multiple or a divisor of tile_k, {step}: a step "
            f"reads tile_k rows, of one chunk or of several whole ones"
        )
    if given.chunk_rows is None and _suits_sizes(group, a, config):
        return HOPPER_CHUNK
    if given.chunk_rows is not None and given.chunk_rows < step:
        return given.chunk_rows
    rows = given.chunk_rows or planning.rows_per_chunk(a.shape[0], defaults.tile_m)
    # no more than there are: the kernel goes through all steps of a chunk
    return max(math.ceil(min(rows, a.shape[0]) / step), 1) * step
