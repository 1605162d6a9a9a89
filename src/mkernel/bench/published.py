"""The figures published for the CUDA library mKernel, for comparison with ours; see published.json.

What can be compared. They were measured with 16 ranks on 2 nodes of 8 H200. Here there may be fewer ranks, several of
which may share a GPU. So shapes are chosen such that a rank computes as much as in the published run (in attention: as
much for each block of keys, of which there are fewer), and floor fractions are compared: the time that the library
alone, or a link alone, would take, divided by the measured time. Milliseconds are not comparable if ranks share a GPU,
and a paced link with 3 peers is not the same as a wire with 15. The floor of a published figure uses the library time
of this run, scaled to a whole GPU; it is omitted if the GPU is not an H200.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkernel.bench.benchmark import Published

NODES, GPUS_PER_NODE = 2, 8
RANKS = NODES * GPUS_PER_NODE
NVLINK, NETWORK = 450e9, 50e9  # bytes/s that a GPU of the published run sends within its node, and to the other node

SAME = "the same: what a rank multiplies (bf16), and the rates of links relative to the GPU's"
DIFFERENT = (
    "not the same: {here} instead of 2 nodes x 8 H200, paced links instead of real ones; compare floor fractions"
)


def gathered(block: float) -> tuple[float, float]:
    """Bytes that a rank of the published run sends within its node, and to the other node, in an all-gather of a block
    of this many bytes from each rank, or in the reverse, a reduce-scatter."""
    return NODES * (GPUS_PER_NODE - 1) * block, (NODES - 1) * block


def place(nodes: int, ranks: int, gpus: int) -> str:
    """A description of the cluster of this run."""
    numbers = ((nodes, "node"), (ranks, "rank"), (gpus, "GPU"))
    first, second, third = (f"{number} {what}{'' if number == 1 else 's'}" for number, what in numbers)
    return f"{first} x {second} on {third}"


@cache
def figures() -> dict[str, Any]:
    return json.loads(resources.files("mkernel.bench").joinpath("published.json").read_text())


def rows(op: str) -> list[dict[str, Any]]:
    """The published times of an operator, in ms, each with its `size`."""
    found = figures()["ops"].get(op, {}).get("efa_ms", [])
    return [{**row, "size": next(iter(row.values()))} for row in found]


def rates(op: str) -> list[dict[str, Any]]:
    """The published TFLOP/s per GPU of an operator with ConnectX-7, each with its `size`."""
    found = figures()["ops"].get(op, {}).get("cx7_tflops", [])
    return [{**row, "size": next(iter(row.values()))} for row in found]


def beside(how: Published, row: dict[str, Any], result: dict[str, Any], gpu: str) -> dict[str, Any]:
    """The published figures for a shape, with their floor fraction, to be added to the result for that shape."""
    found = {
        "published_size": row["size"],
        "published_ms": row["mkernel"],
        "published_nccl_ms": row.get("nccl"),
        "published_floor_fraction": None,
        "published_note": how.note,
    }
    if "H200" not in gpu:
        found["published_note"] = f"no floor: it needs the library's time on an H200, this is a {gpu}"
    else:
        sharing = max(-(-result["ranks"] // result["gpus"]), 1)
        nvlink, network = how.traffic(row["size"])
        library = result["library_ms"] / sharing * (RANKS / result["ranks"] if how.needs_all_ranks else 1)
        floor = max(library, nvlink / NVLINK * 1e3, network / NETWORK * 1e3)
        found["published_floor_fraction"] = floor / row["mkernel"]
    return found
