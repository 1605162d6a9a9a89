"""The configuration of an operator: tiles, chunks and CTAs per role."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """A field that is None gets a good default for the shapes and the machine.

    tile_m, tile_n, tile_k: the tile of the GEMM. group_m: row blocks that are computed together, so
    that CTAs share loads. stages, warps: Triton's num_stages and num_warps.
    ctas: CTAs of a launch; send_ctas, intra_ctas: how many of them post to the network and copy over
    NVLink; the others compute. join_tiles: how many tiles each of these computes after its transfers.
    chunk_rows: rows that are transferred with one signal.
    copy_bytes: bytes that a copying CTA has in flight.
    steps: how much of the keys and values of other ranks is buffered; one step is what one rank has.
    team_ctas: CTAs that compute one tile together, each with a part of k or of the keys; for calls with few rows.
    passes, held_tiles: in how many passes over the gathered rows each CTA computes its first `held_tiles` tiles.
    """

    tile_m: int | None = None
    tile_n: int | None = None
    tile_k: int | None = None
    group_m: int | None = None
    stages: int | None = None
    warps: int | None = None
    ctas: int | None = None
    send_ctas: int | None = None
    intra_ctas: int | None = None
    join_tiles: int | None = None
    chunk_rows: int | None = None
    copy_bytes: int | None = None
    steps: int | None = None
    passes: int | None = None
    held_tiles: int | None = None
    team_ctas: int | None = None


@dataclass(frozen=True)
class Settings:
    """A Config in which every field has a value."""

    tile_m: int
    tile_n: int
    tile_k: int
    group_m: int
    stages: int
    warps: int
    ctas: int
    send_ctas: int
    intra_ctas: int
    join_tiles: int
    chunk_rows: int
    copy_bytes: int
    steps: int = 0
    passes: int = 1
    held_tiles: int = 0
    team_ctas: int = 1
