"""What `mkernel plan --calibrate` measures of a GPU, and which constants of a machine follow.

The calls to time are those that operators name in their models (`Timed`); `mkernel bench` times them, beside the
library. A constant gets the value with which the model takes as long as the call did; constants that depend on each
other are found in turn, a few times. With fewer GPUs than ranks, these share one, as in emulated benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mkernel.operators import Operator, registered
from mkernel.scale.machine import Machine
from mkernel.scale.model import Problem, Timed
from mkernel.scale.predict import emulated, predict

DTYPE = torch.bfloat16
PASSES = 4
STEPS = 40
WIDEST = 64.0  # how far from the one it starts with a constant is sought
COPIED, COPIES = 1 << 30, 5  # bytes; the fastest one counts


@dataclass(frozen=True)
class Result:
    """A timed call: seconds that it took, and the library for the same."""

    operator: Operator
    timed: Timed
    seconds: float
    library: float


def everything_timed() -> list[tuple[Operator, Timed]]:
    return [(operator, timed) for operator in registered("model", "bench").values()
            for timed in operator.load("model").timed]  # fmt: skip


def measure(operator: Operator, timed: Timed) -> Result:
    """Time a call on the GPUs that are here."""
    from mkernel import bench

    flags = [name for name, value in timed.options.items() if value]
    (found,) = bench.run(
        operator.name, [timed.shape], ranks=timed.ranks, dtype=DTYPE, link=None, config=timed.config, options=flags
    )
    return Result(operator, timed, found["fused_ms"] / 1e3, found["library_ms"] / 1e3)


def memory_rate(device: torch.device) -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(COPIES):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * COPIED / min(times)


def with_constant(machine: Machine, name: str, value: float) -> Machine:
    """The machine with another value of a constant; "sm_flops.gemm" is one of several in a table."""
    field, _, kind = name.partition(".")
    changed: dict[str, Any] = {field: getattr(machine, field) | {kind: value} if kind else value}
    return replace(machine, **changed)


def constant_of(machine: Machine, name: str) -> float:
    field, _, kind = name.partition(".")
    value: Any = getattr(machine, field)
    return float(value[kind] if kind else value)


def seconds_of(operator: Operator, timed: Timed, machine: Machine, gpus: int) -> float:
    """The modelled time of a call on a node with this many GPUs."""
    given: dict[str, Any] = dict(options=timed.options, config=timed.config)
    if 1 < timed.ranks <= gpus:
        return predict(operator, timed.shape, machine=machine, gpus_per_node=timed.ranks, **given).seconds
    return emulated(operator, timed.shape, machine, nodes=1, ranks=timed.ranks, **given).seconds


def solve(result: Result, machine: Machine, gpus: int) -> float:
    """The value of a constant with which the model takes as long as the call did, or the closest within bounds; as it
    was, if the model's time does not depend on it."""
    name = result.timed.constant
    assert name is not None
    before = constant_of(machine, name)
    low, high = before / WIDEST, before * WIDEST

    def seconds(value: float) -> float:
        return seconds_of(result.operator, result.timed, with_constant(machine, name, value), gpus)

    of_least, of_most = seconds(low), seconds(high)
    if of_least == of_most:
        return before
    grows = of_most > of_least  # with a duration; with a rate, the call takes less
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        if (seconds(middle) > result.seconds) == grows:
            high = middle
        else:
            low = middle
    return float((low * high) ** 0.5)


def fit(machine: Machine, results: Sequence[Result], gpus: int) -> tuple[Machine, list[str]]:
    """The machine with constants that follow from timed calls, and their names."""
    names = []
    for result in results:
        timed = result.timed
        if timed.library is not None:
            problem = Problem(timed.shape, DTYPE.itemsize, timed.options)
            flops = result.operator.load("model").work(problem, 1, timed.ranks).flops
            rates = {**machine.library_flops, timed.library: flops / result.library}
            beyond = max(machine.beyond_library, result.library / result.seconds)
            machine = replace(machine, library_flops=rates, beyond_library=beyond)
            names += [f"library_flops.{timed.library}", "beyond_library"]
    solved = [result for result in results if result.timed.constant is not None]
    for _ in range(PASSES):
        for result in solved:
            assert result.timed.constant is not None
            machine = with_constant(machine, result.timed.constant, solve(result, machine, gpus))
    return machine, [*dict.fromkeys(names), *(str(result.timed.constant) for result in solved)]


def measure_gpu(machine: Machine, progress: Callable[[str], None]) -> tuple[Machine, list[str]]:
    """The machine with the constants of the GPUs that are here, and the names of these constants."""
    device = torch.device("cuda", torch.cuda.current_device())
    properties: Any = torch.cuda.get_device_properties(device)
    progress("the memory of the GPU")
    machine = replace(
        machine, sms=properties.multi_processor_count, capability=10 * properties.major + properties.minor,
        memory=memory_rate(device),
    )  # fmt: skip
    results = []
    for operator, timed in everything_timed():
        progress(f"{operator.name} {'x'.join(map(str, timed.shape))}")
        results.append(measure(operator, timed))
    machine, names = fit(machine, results, torch.cuda.device_count())
    return machine, ["sms", "capability", "memory", *names]
