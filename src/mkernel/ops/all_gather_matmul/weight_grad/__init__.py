"""all_gather_matmul_weight_grad: dw = the concatenation of every rank's a, transposed, times this rank's dy, in one
kernel per rank.

What it computes. Every rank holds rows a [m, k] of a tall matrix and its own dy [world*m, n]. The result on each rank
is the tall matrix, transposed, times its dy: [k, n], the gradient of b in y = all_gather_matmul(a, b). The gathered
rows are the reduction dimension of the GEMM. So every tile of the result needs the rows of every rank, where a tile of
all_gather_matmul needs those of one.

Who does what. One persistent launch per rank; the program id of a CTA determines its role (kernel.py):

- `send` and `intra` move rows exactly as in all_gather_matmul, with the same code (transfer.py).
- `compute` multiplies tiles of the result, a block of columns of a by a block of columns of dy, in steps of tile_k
  rows. It takes rows in the order in which they arrive: the rank's own, which it reads from the caller's tensor, those
  of its node, those of other nodes.
- `send` and `intra` CTAs join the compute when their transfers are done, with tiles that were reserved for them. By
  then most rows have arrived, and they compute each tile at once.

Large calls in one node take the kernel in hopper.py on Hopper. Its warps have these roles, so no CTA is reserved.

Passes. A CTA that kept the sums of one tile in registers until the last rows arrive would overlap the transfer with
that one tile only, and compute its other tiles afterwards. So each compute CTA takes its first `held_tiles` tiles in
`passes` passes over the rows: pass 0 has the rank's own rows, the others equal shares of the rest. In a pass it waits
for the rows of the pass, once, and then goes through these tiles; their partial sums are in memory in between, in fp32.
After the last pass all rows are here, and it computes each of its remaining tiles at once. `plan.py` chooses both
numbers, and the number of CTAs that copy, by an estimate of the time. No wait is inside the loop over steps: Triton
would not pipeline that loop, and whatever waits there drains the tensor cores.

Signals. `arrived[parity, rank, chunk]`, as in all_gather_matmul. A chunk has a whole number of steps, or a step a whole
number of chunks; the larger of both is a *block*, and the order of arrival is that of blocks. The rows of a rank end at
m: descriptors [ranks, m, columns] return zeros beyond, for a and for dy, and pointers are masked. Nothing that has not
arrived is multiplied, not even by zero: it could be NaN.

Why buffers are safe. By the argument of all_gather_matmul: a rank leaves an epoch only after the rows of every rank
have arrived, because every compute CTA waits for all passes, even one without tiles. Partials are private to the CTA
that computes the tile, in memory of the call; a CTA barrier separates storing and loading them.

Why it cannot deadlock. `send` waits only for the proxy, `intra` for `send` CTAs of other nodes, `compute` for both:
CTAs with lower program ids. A CTA that has joined the compute has done its transfers, but waits for those of CTAs with
higher program ids on other ranks. So all CTAs must be resident, and no more are launched than fit (planning.check).
With join_tiles=0, a launch would finish even if its CTAs ran one after the other. Waits have a timeout nevertheless.

The bits of the result depend on the rank, the sizes and the plan, never on timing: the order of steps is fixed, and a
partial is added to the sums of the next pass. Ranks add in different orders, each starting with its own rows.

What it costs. 2*world*m*n*k FLOPs, and the traffic of all_gather_matmul. Each pass but the first stores and loads
tile_m * tile_n fp32 partials per held tile. CTAs that copy are lost to the compute until they join it. The workspace
takes 2*world*m*k elements per rank; it is not shared with that of all_gather_matmul, because wait records get the
operator's name from it. Partials take ctas * held_tiles tiles of fp32 during the call, if there are several passes.

How much passes gain was measured with 4 ranks that share a GPU (docs/experiments.md), and estimated for 4 GPUs. For
m_total 16384, n 2048, k 8192, by the rates that plan.py assumes: the multiplication alone takes 0.68 ms, and the last
rows arrive after 0.45 ms if 14 CTAs copy. Waiting for all rows first takes 1.33 ms; one pass in which the first tile of
each CTA waits as it goes, 1.15 ms; three passes over five tiles, 0.96 ms.

Rejected alternatives.
- The slice of k (TorchTitan). The forward keeps k/world columns of all gathered rows; the backward gathers these
  slices, transposed, and computes (AG(x_k^T) @ dy)^T by an ordinary all_gather_matmul, whose gathered rows are rows of
  the result. That overlaps as well as the forward does, without passes. But the forward must write out the slice, as
  many elements as a, and keep it beside a, which whatever produced a usually keeps anyway. Here a is enough.
- One pass, with a wait for each chunk in the loop of the first tile: simpler, and slower, see above.
- One launch for each chunk that adds to the result: partials of every tile cross memory for every chunk, and bf16
  results would be rounded each time.
- Atomic additions to an fp32 result, so that CTAs need not own tiles: other bits in every run.
- Own rows through the workspace, so that one loop has all rows: another copy of m*k elements before the first step.
- Only CTAs with the highest program id of their role join, so that residency does not matter: the others, a tenth of
  all CTAs where the link is fast, would idle after the last transfer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mkernel.ops.all_gather_matmul import protocol
from mkernel.ops.all_gather_matmul.weight_grad import kernel
from mkernel.ops.all_gather_matmul.weight_grad.plan import OP, Plan, chunk_rows, plan
from mkernel.runtime import planning
from mkernel.runtime.collective import collective
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, current
from mkernel.runtime.matmul import check_out, check_tensor
from mkernel.runtime.operands import DTYPES, layout, matmul_precision
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

TUNABLE = Tunable(OP, agreed=("m", "k"), own=("n",), shared=("chunk_rows",))


@collective
def all_gather_matmul_weight_grad(
    a: torch.Tensor,
    dy: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Gather every rank's `a` and multiply its transpose by this rank's `dy`, overlapped, in one kernel: the gradient
    of the weight b of `all_gather_matmul(a, b)`, if dy is the gradient of its result.

    Args:
        a: [m, k], this rank's rows, in bf16, fp16 or fp32. Shape and dtype must be the same on every rank.
            Any strides.
        dy: [world*m, n], in a's dtype, with the rows in rank order; n may differ between ranks. Any strides.
        group: the group to gather over; the current group by default.
        out: [k, n], tensor for the result; must not overlap a or dy. Any strides: for the gradient of `w.t()`, pass
            the transposed view of a tensor that is laid out like w.
        config: tiles, chunks, passes and CTAs; None selects defaults.

    Returns:
        [k, n], in a's dtype; accumulated in fp32, in an order that depends on the rank, the sizes and the
        configuration, but not on timing.

    Raises:
        ArgumentError: an argument is invalid; nothing has been launched.
        CommTimeout: a peer did not arrive within the group's timeout. On a GPU, where calls return before
            they are done, the next call on the group or `group.synchronize()` raises it.
    """
    assert group is not None
    key, made = group.prepared.repeat(OP, (a, dy, out), config, out=2)
    if made is not None:
        return made[0] if out is None else out
    _check(group, a, dy, out, config)
    config = _choose(group, a, dy, config)
    m, k = a.shape
    group.agree(OP, m=m, k=k, dtype=a.dtype, chunk_rows=chunk_rows(group, a, config))
    result = group.world.memory.empty(group.world_rank, (k, dy.shape[1]), a.dtype) if out is None else out
    if a.numel():
        group.launch(prepare(group, a, dy, result, config), key, (a, dy, out), [result] * (out is None))
    else:
        group.confirm()
        result.zero_()
    return result


def _check(group: Group, a: torch.Tensor, dy: torch.Tensor, out: torch.Tensor | None, config: Config | None) -> None:
    """Reject invalid arguments. The error names the argument and the rule."""
    planning.check_given(config)
    for name, tensor in (("a", a), ("dy", dy), *([("out", out)] if out is not None else [])):
        check_tensor(OP, group, name, tensor)
    if a.dtype not in DTYPES:
        raise ArgumentError(f"a has dtype {a.dtype}; supported are {', '.join(str(d) for d in DTYPES)}")
    if dy.dtype != a.dtype:
        raise ArgumentError(f"dy has dtype {dy.dtype}, but a has {a.dtype}: they must be the same")
    m, k = a.shape
    if dy.shape[0] != group.size * m:
        raise ArgumentError(
            f"a is {(m, k)} and dy is {tuple(dy.shape)}: dy must have a row for each of the {group.size * m} gathered "
            f"rows of a, {m} from each of {group.size} ranks"
        )
    if out is not None:
        check_out(out, (k, dy.shape[1]), "k, n", a.dtype, {"a": a, "dy": dy})


def _choose(group: Group, a: torch.Tensor, dy: torch.Tensor, given: Config | None) -> Config | None:
    """The configuration of a call. Chunks are the same on every rank, even if only some have a tuned configuration."""
    config = TUNABLE.choose(group, a.dtype, given, m=a.shape[0], n=dy.shape[1], k=a.shape[1])
    if given is None and config is not None and config.chunk_rows is None:
        return replace(config, chunk_rows=chunk_rows(group, a, None))
    return config


def prepare(group: Group, a: torch.Tensor, dy: torch.Tensor, out: torch.Tensor, config: Config | None) -> Launch:
    """The launch of a call with valid arguments. Collective if the workspace must grow."""
    config = _choose(group, a, dy, config)
    plain = group.heap.find(a) is None
    key = (OP, layout(a), layout(dy), layout(out), plain, config, matmul_precision(a.dtype))
    decided = group.planned(key, lambda: plan(group, a, dy, out, config))
    memory = protocol.layout(group.size, a.shape[0], decided.chunks, decided.access.rows.row_stride, a.dtype, OP)
    if decided.hopper:
        from mkernel.ops.all_gather_matmul.weight_grad import hopper  # Gluon is imported only where it runs

        return hopper.launch(group, decided, memory, a, dy, out)
    return kernel.launch(group, decided, memory, a, dy, out)


def explain(
    a: torch.Tensor,
    dy: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> Plan:
    """The plan that `all_gather_matmul_weight_grad` would execute with these arguments."""
    group = current(group)
    _check(group, a, dy, out, config)
    if out is None:
        out = torch.empty((a.shape[1], dy.shape[1]), dtype=a.dtype, device=a.device)
    chosen = _choose(group, a, dy, config)
    decided = plan(group, a, dy, out, chosen)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
