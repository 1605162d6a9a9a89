"""Traces: what every CTA of every rank did, and when; for humans and for Perfetto.

    with mk.trace() as trace:              # every rank of the group
        y = mk.all_gather_matmul(a, b)
    if group.rank == 0:
        trace.save("trace.json")           # for ui.perfetto.dev or chrome://tracing
        trace.html("trace.html")           # a self-contained page

The kernels write the events (lang/trace.py), `events` interprets them, and `chrome` and `page` write files. Traces of
the simulator have simulated times: see `Scheduler.stamp`.
"""

from mkernel.tracing.events import Event
from mkernel.tracing.session import Trace, trace

__all__ = ["Event", "Trace", "trace"]
