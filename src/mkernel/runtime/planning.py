"""What the plans of GEMM operators share: default tiles, and checks of a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from mkernel.runtime.config import Config, Settings
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.gpus import Target

if TYPE_CHECKING:
    from mkernel.runtime.group import Group

# For an H200. 6.1e12 is cuBLAS's measured 802 TFLOP/s over 132 SMs, 9.5e12 its 1258 in fp8; fp32 is a guess.
CTA_RATE = {
    torch.bfloat16: 6.1e12, torch.float16: 6.1e12, torch.float32: 0.3e12, torch.float8_e4m3fn: 9.5e12,
    torch.float8_e5m2: 9.5e12,
}  # FLOP/s  # fmt: skip
NVLINK_RATE = 450e9  # bytes/s that one GPU sends to its node
QUANTIZE_RATE = 10e9  # elements/s that one CTA quantizes: a guess
NETWORK_RATE = 50e9  # bytes/s that one GPU sends to other nodes: 400 Gb/s

# Resources of a CTA, the most of any GPU. The simulator has the same limits.
REGISTERS = 65536
SHARED_MEMORY = 227 * 1024  # bytes
LARGEST_TENSOR = int(tl.TRITON_MAX_TENSOR_NUMEL)  # elements

# field -> (min, max, must it be a power of two?)
BOUNDS = {
    "tile_m": (16, REGISTERS // 16, True),  # the other side of a tile is at least 16
    "tile_n": (16, REGISTERS // 16, True),
    "tile_k": (16, 4096, True),  # 16 rows of it, of 16-bit numbers, fit into shared memory
    "group_m": (1, 1024, False),  # its product with the column blocks must fit into 32 bits
    "stages": (1, SHARED_MEMORY // 1024, False),  # the smallest tile takes 1 KiB
    "warps": (1, 32, True),  # threads of a CTA
    "chunk_rows": (1, 2**30, False),  # rows are counted in 32 bits
    "copy_bytes": (64, 4 * REGISTERS, True),  # they go through registers
    "passes": (1, 64, False),
    "held_tiles": (1, 1024, False),
    "team_ctas": (1, 16, True),  # at most one row of the smallest tile for each
}


@dataclass(frozen=True)
class TileDefaults:
    tile_m: int
    tile_n: int
    tile_k: int
    group_m: int
    stages: int
    warps: int
    copy_bytes: int


def default_tiles(device: Target, dtype: torch.dtype, n: int, uses_tma: bool) -> TileDefaults:
    """The tile of a GEMM with n columns; `uses_tma`: all operands go through tensor descriptors."""
    if device.type != "cuda":
        return TileDefaults(32, 32, 32, group_m=2, stages=1, warps=4, copy_bytes=1024)
    if dtype == torch.float32:
        return TileDefaults(64, 64, 32, group_m=8, stages=3, warps=8, copy_bytes=16384)
    if dtype.itemsize == 1:  # sums outside of the tensor cores take the registers of a second tile
        return TileDefaults(128, 128, 128 if uses_tma else 64, group_m=8, stages=4, warps=8, copy_bytes=32768)
    if uses_tma and n > 128:
        return TileDefaults(128, 256, 64, group_m=8, stages=3, warps=8, copy_bytes=65536)
    # pointers for a 128 x 256 tile do not fit into the registers
    return TileDefaults(128, 128, 64, group_m=8, stages=3, warps=8, copy_bytes=65536)


@dataclass(frozen=True)
class FewRows:
    """The tile of a product with few rows, and how many CTAs compute one together."""

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    warps: int
    team: int


def few_rows(
    device: Target, dtype: torch.dtype, rows: int, n: int, k: int | None, ctas: int, promoted: bool = False
) -> FewRows | None:  # fmt: skip
    """The smallest tile of which there is at most one for each CTA, and the largest team. None if there are more tiles,
    or if such tiles were not measured. Those of 16-bit elements are the fastest of those that were tried on an H200,
    one rank, beside cuBLAS: see docs/performance.md. Those of fp8 follow from them, and were not measured. k: if it is
    known, teams are no larger than it takes to give each member a few steps. promoted: sums of fp8 products leave the
    tensor cores after every 128 of k."""
    if device.type != "cuda" or dtype.itemsize > 2 or not rows * n:
        return None
    height = max(1 << (rows - 1).bit_length(), 16)
    if dtype.itemsize == 1:
        # As many bytes are in flight as of 16-bit elements, so that b is read as fast. With steps of 256 of which two
        # sums leave the tensor cores, ptxas would serialize the products. Hopper computes only products of 64 rows and
        # more in fp8; rows that do not exist are not read.
        height = max(height, 64)
        tiles = [(64, 64, 256, 6, 4), (64, 128, 256, 4, 4)]
        if promoted:
            tiles = [(64, 64, 128, 12, 4), (64, 128, 128, 8, 4)]
        if height > 64:
            tiles.append((128, 128, 128, 6, 8))
    elif height <= 32:
        tiles = [(height, 64, 128, 6, 4), (height, 128, 128, 5, 4)]
    else:
        tiles = [(64, 64, 128, 6, 4), (64, 128, 128, 4, 4)]
        if height > 64:
            tiles.append((128, 128, 64, 6, 8))
    for i, (tile_m, tile_n, tile_k, stages, warps) in enumerate(tiles):
        count = math.ceil(rows / tile_m) * math.ceil(n / tile_n)
        most = min(ctas // count, 16, max(k // (2 * tile_k), 1) if k is not None else 16)  # 0: too many tiles
        if most in (2, 3) and height != 64:
            # four CTAs on a tile twice as wide read less
            wider = tiles[i + 1]
            count = math.ceil(rows / wider[0]) * math.ceil(n / wider[1])
            if wider[0] == tile_m and ctas // count >= 4 and (k is None or k // (2 * wider[2]) >= 4):
                return FewRows(*wider, 4)
        if most:
            return FewRows(tile_m, tile_n, tile_k, stages, warps, largest_team(most))
    return None


def largest_team(most: int) -> int:
    """The largest power of two that is not more than `most`."""
    return 1 << (max(most, 1).bit_length() - 1)


def ctas_of_teams(given: int | None, wanted: int, team: int, most: int) -> int:
    """CTAs of a launch with teams of this size: no others. given: as configured; `check` refuses more than there are.
    wanted: if nothing was configured."""
    if given is not None:
        return given if given > most else given // team * team
    return min(-(-wanted // team), most // team) * team


def push_rate(peers: int) -> float:
    """Total bytes/s that one CTA pushes to this many peers. Measured: 37 GB/s to three peers while the GEMM waited for
    it; less is assumed next to a GEMM that does not wait. The figure for one peer explains the measurement that CTAs
    which pushed 67 MB each had no time left for a second tile."""
    return 24e9 if peers == 1 else 33e9


def chooser(config: Config | None) -> Callable[[str, int], int]:
    """Return choose(name, default): the value of a field of the configuration, or the default."""
    given = config or Config()

    def choose(name: str, default: int) -> int:
        value = getattr(given, name)
        return default if value is None else value

    return choose


def count_of_ctas(count: int) -> str:
    """A number of CTAs, for the reasons of a plan."""
    return f"{count} CTA" if count == 1 else f"{count} CTAs"


def roles_of(config: Settings) -> str:
    """How many CTAs copy, and what they do afterwards, for the head of a plan."""
    roles = f"{config.send_ctas} send, {config.intra_ctas} intra"
    if not config.join_tiles or not config.send_ctas + config.intra_ctas:
        return roles
    tiles = "1 tile" if config.join_tiles == 1 else f"{config.join_tiles} tiles"
    return f"{roles}, which compute {tiles} each when they are done"


def common_ctas(group: Group) -> int:
    """How many CTAs every rank of the group can have: the same number on all ranks."""
    return min(group.world.launcher.ctas(member) for member in group.members)


def reasons_of_access(descriptors: bool, uses_tma: Mapping[str, bool]) -> list[str]:
    """Why tensors are not accessed through descriptors, for a plan."""
    if not descriptors:
        return ["the device has no tensor descriptors (TMA): operands are read through pointers"]
    return [
        f"{name} has no contiguous, 16-byte aligned rows: it is accessed through pointers"
        for name, good in uses_tma.items()
        if not good
    ]


def tile_of_sum(
    device: Target, dtype: torch.dtype, rows: int, n: int, wanted: float, wide: bool = False
) -> tuple[int, int]:  # fmt: skip
    """Rows and columns of a tile, for a sum over ranks [rows, n] that should have at least `wanted` tiles: the widest
    tile that gives as many, or else the narrowest. Depends only on what is the same on every rank, since ranks exchange
    whole tiles. wide: 256 columns are best even where portable kernels prefer fewer, as long as narrower tiles would
    not be computed in a single round."""
    default = default_tiles(device, dtype, n, uses_tma=True)
    if device.type != "cuda" or dtype == torch.float32:
        return default.tile_m, default.tile_n
    tile_m = default.tile_m if rows > 64 else 64
    if wide and rows > 64 and 2 * math.ceil(rows / tile_m) * math.ceil(n / 256) > wanted:
        return tile_m, 256
    for tile_n in (256, 128, 64):
        if tile_n <= default.tile_n and (math.ceil(rows / tile_m) * math.ceil(n / tile_n) >= wanted or tile_n == 64):
            break
    return tile_m, tile_n


def settings_of_sum(
    device: Target, dtype: torch.dtype, tile_m: int, tile_n: int, uses_tma: bool, ctas: int,
    config: Config | None,
) -> Settings:  # fmt: skip
    """The other settings of an operator that sums over ranks, all of whose CTAs compute. `uses_tma`: a and b are read
    through descriptors."""
    defaults = default_tiles(device, dtype, tile_n, uses_tma)
    depth, stages, warps = defaults.tile_k, defaults.stages, defaults.warps
    if device.type == "cuda" and dtype != torch.float32:
        if uses_tma:
            stages = max(min(150 * 1024 // ((tile_m + tile_n) * depth * dtype.itemsize), 6), 2)
        elif tile_n > 128:
            # pointers for more of a wide tile do not fit into the registers beside its sum
            depth = 32 // dtype.itemsize
        if tile_m == 64:
            warps = 4  # a warp holds 16 rows of the sum
    choose = chooser(config)
    return Settings(
        tile_m=tile_m, tile_n=tile_n, tile_k=choose("tile_k", depth), group_m=choose("group_m", defaults.group_m),
        stages=choose("stages", stages), warps=choose("warps", warps), ctas=choose("ctas", ctas),
        send_ctas=0, intra_ctas=0, join_tiles=0, chunk_rows=tile_m, copy_bytes=defaults.copy_bytes,
    )  # fmt: skip


def copiers_for(pushed: int, rate: float, compute_seconds: float, link: float, ctas: int) -> int:
    """How many CTAs should push this many bytes: enough to finish with the compute, and no more than the link can use.
    Each of them is lost to the compute. Measured with 4 ranks, 16384 x 2048 x 8192: two that push to the end take 3.09
    ms, three that join the compute after two thirds of the time take 3.11."""
    in_time = math.ceil(pushed / rate / max(1.15 * compute_seconds, 1e-9))
    useful = math.ceil(link / rate) + 1
    return max(min(in_time, useful, ctas // 4), 1)


def quantizers_for(elements: int, chunks: int, compute_seconds: float, ctas: int) -> int:
    """How many CTAs should quantize so many elements: enough to finish within half of the compute, as tiles of other
    ranks' rows come later. Each of them is lost to the compute."""
    in_time = math.ceil(elements / QUANTIZE_RATE / max(0.5 * compute_seconds, 1e-9))
    return max(min(in_time, chunks, ctas // 4), 1)


def fewest_ctas(tiles: int, most: int) -> int:
    """The fewest CTAs that compute the tiles in as many rounds as `most` CTAs would: more would only take power and
    memory bandwidth from them."""
    rounds = max(math.ceil(tiles / most), 1)
    return max(math.ceil(tiles / rounds), 1)


def join_tiles_for(tiles: int, ctas: int, helpers: int, done: int) -> int:
    """How many tiles each helper should compute so that all CTAs end together, if its transfers take as long as `done`
    tiles. At least one, since the last round is rarely full."""
    compute = ctas - helpers
    rounds = max(math.ceil(tiles / ctas), 1)
    while compute * rounds + helpers * max(rounds - done, 1) < tiles:
        rounds += 1
    return max(rounds - done, 1)


def rows_per_chunk(m: int, tile_m: int) -> int:
    """The rows of a tile, or fewer if there would be less than 16 chunks to copy."""
    share = max(-(-m // 16), 1)
    return tile_m if share >= tile_m else max(1 << (share.bit_length() - 1), min(8, tile_m))


def check_timeout(timeout: float) -> None:
    """Refuse an invalid timeout."""
    if not (isinstance(timeout, (int, float)) and 0 < timeout < 1e9):
        raise ArgumentError(f"timeout must be finite and more than 0 seconds; got {timeout!r}")


def check_flag(name: str, value: Any) -> None:
    """Refuse a switch that is not a bool: "no" would be true."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {value!r}")


def check_given(config: Config | None) -> None:
    """Refuse an invalid configuration, before anything is computed from it."""
    if config is None:
        return
    if not isinstance(config, Config):
        raise ArgumentError(f"config must be a mk.Config, got {type(config).__name__}")
    for field in fields(config):
        value = getattr(config, field.name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ArgumentError(f"config.{field.name} must be a whole number, 0 or more; got {value!r}")
    for name, (least, most, power) in BOUNDS.items():
        value = getattr(config, name)
        if value is not None and not (least <= value <= most and not (power and value & (value - 1))):
            kind = "a power of two" if power else "a whole number"
            raise ArgumentError(f"config.{name} must be {kind} from {least} to {most}; got {value}")


def check_without_helpers(op: str, config: Config | None) -> None:
    """Refuse a configuration of roles and chunks for an operator that has neither."""
    for name in ("send_ctas", "intra_ctas", "join_tiles", "chunk_rows", "copy_bytes"):
        if config is not None and getattr(config, name) is not None:
            raise ArgumentError(f"config.{name} does not apply to {op}: all its CTAs compute, and it sends whole tiles")


def least_shared_memory(stages: int, staged: tuple[int, int], uses_tma: bool) -> int:
    """The least number of rows of a stage's two blocks that Triton keeps in shared memory; it may keep twice as many.
    Of two blocks that are read through pointers, one may stay in registers."""
    return max(stages * min(staged), (stages - 1) * sum(staged) if uses_tma else 0)


def check_tile(
    config: Settings, dtype: torch.dtype, uses_tma: bool, *, columns: int = 0, staged: tuple[int, int] | None = None
) -> None:  # fmt: skip
    """Refuse a tile that does not fit on any GPU. `uses_tma`: operands are read through descriptors. A tile has
    `columns` sums in each row, and each of its stages two blocks of `staged` rows of tile_k elements; the defaults are
    those of a GEMM."""
    m, n, k, stages = config.tile_m, config.tile_n, config.tile_k, config.stages
    columns, staged = columns or n, staged or (m, n)
    tile = f"config.tile_m is {m}, tile_n {n} and tile_k {k}"
    if m * columns > REGISTERS:
        raise ArgumentError(
            f"{tile}: the sums of a tile, {m} x {columns}, must fit into the {REGISTERS} registers of a CTA; with so "
            f"many columns, tile_m may be at most {REGISTERS // columns}"
        )
    if max(staged) * k > LARGEST_TENSOR:
        raise ArgumentError(
            f"{tile}: a block of {max(staged)} x {k} has more than the {LARGEST_TENSOR} elements that Triton allows; "
            f"with so many rows, tile_k may be at most {LARGEST_TENSOR // max(staged)}"
        )
    needed = least_shared_memory(stages, staged, uses_tma) * k * dtype.itemsize
    if needed > SHARED_MEMORY:
        raise ArgumentError(
            f"{tile}, and config.stages {stages}: that takes {needed} bytes of shared memory or more, and a CTA has at "
            f"most {SHARED_MEMORY}; take fewer stages, or a smaller tile"
        )


def check(
    config: Settings, *, max_ctas: int, least_send: int, least_intra: int, copiers_compute: bool = False
) -> None:  # fmt: skip
    """Refuse numbers of CTAs that could not run. `copiers_compute`: CTAs that copy also compute."""
    for name, least in (("send_ctas", least_send), ("intra_ctas", least_intra)):
        if getattr(config, name) < least:
            raise ArgumentError(f"config.{name} must be at least {least} for this group and these tensors")
    least = config.send_ctas + (max(config.intra_ctas, 1) if copiers_compute else config.intra_ctas + 1)
    if config.ctas < least:
        raise ArgumentError(
            f"config.ctas is {config.ctas}, but must be at least {least}: send_ctas + intra_ctas, and one that computes"
        )
    if config.ctas > max_ctas:
        raise ArgumentError(
            f"config.ctas is {config.ctas}, but only {max_ctas} CTAs of this rank can run at the same time; "
            f"CTAs that wait for each other must all be resident"
        )
