"""Which kernel runs a call of ring_attention_backward."""

from __future__ import annotations

import torch

from mkernel.runtime.config import Config
from mkernel.runtime.gpus import capability
from mkernel.runtime.group import Group
from mkernel.runtime.operands import describable

HOPPER_TILE = 128  # queries of a tile of dq, and keys of a block of keys, in the Gluon kernel
HOPPER_ROWS = 64  # it multiplies them with so many keys or queries at a time: its tile_n
HOPPER_STAGES = 3


def why_not_gluon(
    group: Group, inputs: dict[str, torch.Tensor], length: int, parts: int, softcap: float, config: Config | None
) -> str | None:  # fmt: skip
    """Why a call cannot run the Gluon kernel; None if it can. inputs: those that it would read by TMA, and the result
    of the forward pass. length: the largest number of keys of a rank."""
    query, value = inputs["query"], inputs["value"]
    if group.target.type != "cuda" or capability(group.target)[0] != 9:
        return "the Gluon kernel runs on Hopper GPUs only"
    if query.dtype == torch.float32:
        return "the Gluon kernel does not support fp32"
    if query.shape[3] > HOPPER_TILE:
        return f"the Gluon kernel supports at most {HOPPER_TILE} columns"
    if value.shape[3] != query.shape[3]:
        return "the Gluon kernel needs values with the head dimension of queries"
    if softcap:
        return "the Gluon kernel does not support softcap"
    unaligned = [name for name, tensor in inputs.items() if tensor.numel() and not describable(tensor)]
    if unaligned:
        return f"the Gluon kernel needs contiguous, 16-byte aligned rows, unlike those of {', '.join(unaligned)}"
    if group.size > 1 and length == 1:  # a constant then, for which Triton 3.6 cannot compile it
        return "the Gluon kernel needs more than one key per rank"
    if parts > 1:
        return "the Gluon kernel does not support heads in several parts"
    fixed = ("tile_m", "tile_n", "stages", "warps")
    chosen = [name for name in fixed if config and getattr(config, name) is not None]
    if chosen:
        return f"the Gluon kernel has a fixed tile, but the configuration sets {', '.join(chosen)}"
    return None


def kernel_of(
    group: Group, inputs: dict[str, torch.Tensor], length: int, parts: int, softcap: float, config: Config | None
) -> tuple[str, str]:  # fmt: skip
    """(the kernel that runs a call, why). length: as above."""
    why_not = why_not_gluon(group, inputs, length, parts, softcap, config)
    if why_not is not None:
        return "triton", f"Triton: {why_not}"
    return "gluon", "Gluon: a Hopper GPU, 16-bit floats, TMA for all"
