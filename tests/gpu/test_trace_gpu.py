"""Traces on a GPU: what they show, that they agree with the clock of the benchmarks, and what they cost."""

import json

import pytest
import torch
from support.workloads import workload_of

import mkernel as mk
from mkernel.bench.timing import Stopwatch
from mkernel.runtime.tracer import Tracer
from mkernel.tracing.events import events_of
from mkernel.tracing.links import arrivals

SHAPE = (16384, 2048, 8192)
RANKS = 4
LINKS = mk.Links(nvlink=450 / RANKS)
KERNELS = {"hopper": None, "portable": mk.Config(stages=3)}
REPEATS = 40
BURST = 4  # launches that count, after as many that do not
CLOCK = 3000  # nanoseconds by which the timers of two SMs may differ, and a store may be late


def only_on_hopper(kernel):
    if kernel == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("that kernel is for Hopper")


@pytest.mark.parametrize("kernel", KERNELS)
def test_overlap_is_visible_and_everything_is_there(kernel, tmp_path):
    only_on_hopper(kernel)

    def on_rank(group):
        call = workload_of("all_gather_matmul").make(group, SHAPE, torch.bfloat16)
        before = call.run(KERNELS[kernel]).clone()
        with mk.trace(events=1):
            call.run(KERNELS[kernel])
        with mk.trace() as trace:
            for _ in range(2):
                during = call.run(KERNELS[kernel])
        assert torch.equal(before, during)
        return trace

    trace = mk.spawn(on_rank, gpus_per_node=RANKS, device="cuda", links=LINKS)[0]
    assert trace.lost == 0
    assert trace.emulated
    assert not trace.simulated
    tiles = (SHAPE[0] // 128) * (SHAPE[1] // 256)
    for rank in range(RANKS):
        assert trace.calls(rank) == ["all_gather_matmul"] * 2
        for call in range(2):
            found = {(event.peer, event.index) for event in trace.of(rank, "tile", call=call)}
            count = len(trace.of(rank, "tile", call=call))
            assert count == tiles
            assert len(found) == tiles
            pushed = sorted(event.index for event in trace.of(rank, "push", call=call))
            assert pushed == list(range(len(pushed)))
            # most of the copying is hidden behind tiles, and tiles of other ranks begin while copies still run
            assert trace.overlap(rank, call) > 0.8
            last_push = max(event.end for event in trace.of(rank, "push", call=call))
            foreign = [event for event in trace.of(rank, "tile", call=call) if event.peer != rank]
            assert min(event.start for event in foreign) < last_push
            start, end = trace.span(rank, call)
            for event in trace.of(rank, call=call):
                assert start - CLOCK <= event.start <= event.end + CLOCK
                assert event.end <= end + CLOCK
    pairs = list(arrivals(trace))
    assert len(pairs) > 0
    assert all(sent.end <= seen.end + CLOCK for sent, seen in pairs)
    trace.save(tmp_path / "trace.json")
    trace.html(tmp_path / "trace.html")
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > len(trace.events)
    for line in trace.summary()[:2]:
        print(kernel, line)


@pytest.mark.parametrize("kernel", KERNELS)
def test_busy_time_matches_the_benchmark_and_the_cost_is_small(kernel):
    """Plain and traced launches by turns, as `mkernel bench` times them; then the events of the last launch of another
    such burst. (The first ones after a pause are slower.)"""
    only_on_hopper(kernel)

    def on_rank(group):
        call = workload_of("all_gather_matmul").make(group, SHAPE, torch.bfloat16)
        plain = call.tried.prepare(KERNELS[kernel])
        # room for everything: an event that is only counted would cost less
        tracer = Tracer(group, 20_000)
        traced = tracer.traced(plain)
        stream = torch.cuda.current_stream()
        everyone = group.exchange("ready", (plain, traced, stream, tracer))
        times = None
        if group.rank == 0:
            world = group.world

            def launch(which):
                chosen = {rank: (entry[which], entry[2]) for rank, entry in enumerate(everyone)}
                return lambda: world.launcher.launch_together(chosen)

            stopwatch = Stopwatch([entry[2] for entry in everyone])
            stopwatch.time(launch(0), 2)
            stopwatch.time(launch(1), 2)
            times = stopwatch.bursts({"plain": launch(0), "traced": launch(1)}, REPEATS)
            for entry in everyone:
                entry[3].clear()
            torch.cuda.synchronize()
            stopwatch.time(launch(1), BURST)
            torch.cuda.synchronize()
        times = group.exchange("times", times)[0]
        tracer.launches[:] = [(traced.op, traced.grid)] * (2 * BURST)
        lanes = tracer.read()
        assert all(lane.lost == 0 for lane in lanes)
        events = [event for event in events_of(group.rank, lanes, tracer.launches, 0) if event.call == 2 * BURST - 1]
        return times, events

    results = mk.spawn(on_rank, gpus_per_node=RANKS, device="cuda", links=LINKS, timeout=60.0)
    times = results[0][0]
    cost = times["traced"] / times["plain"] - 1
    print(f"{kernel}: plain {times['plain']:.4f} ms, traced {times['traced']:.4f} ms, cost {cost:.2%}")
    by_rank = []
    for _, events in results:
        launches = {event.cta: event for event in events if event.kind == "launch"}
        whole = max(event.end for event in launches.values()) - min(event.start for event in launches.values())
        # the portable kernel has CTAs that copy first; the others compute, and wait themselves for what they need
        copying = {event.cta for event in events if event.kind in ("push", "send")} if kernel == "portable" else set()
        busy = {cta: 0 for cta in launches if cta not in copying}
        for event in events:
            if event.cta in busy and (event.kind == "tile" or (kernel == "portable" and event.waits)):
                busy[event.cta] += event.duration
        by_rank.append(
            {
                "launch over benchmark": whole / 1e6 / times["plain"],
                "busy over benchmark": sum(busy.values()) / len(busy) / 1e6 / times["plain"],
                "busy over own launch": min(spent / launches[cta].duration for cta, spent in busy.items()),
            }
        )
    for line in by_rank:
        print(kernel, line)
    assert cost < 0.03
    for line in by_rank:
        assert 0.95 < line["launch over benchmark"] < 1.05
        assert 0.95 < line["busy over own launch"] <= 1.001
        if kernel == "hopper":  # all of its CTAs compute to the end
            assert 0.95 < line["busy over benchmark"] < 1.05


EVERY = {
    "matmul_reduce_scatter": (SHAPE, {}),
    "matmul_all_reduce": (SHAPE, {}),
    "ring_attention": ((4, 16, 12288, 128), dict(causal=True, zigzag=True)),
    "moe_dispatch_matmul": ((8192, 2048, 7168), {}),
    "moe_ffn": ((4096, 2048, 4096), {}),
}


@pytest.mark.parametrize("op", EVERY)
def test_the_cost_is_small_for_every_operator(op):
    shape, options = EVERY[op]

    def on_rank(group):
        call = workload_of(op).make(group, shape, torch.bfloat16, **options)
        plain = call.tried.prepare(None)
        tracer = Tracer(group, 20_000)
        traced = tracer.traced(plain)
        everyone = group.exchange("ready", (plain, traced, torch.cuda.current_stream()))
        times = None
        if group.rank == 0:

            def launch(which):
                chosen = {rank: (entry[which], entry[2]) for rank, entry in enumerate(everyone)}
                return lambda: group.world.launcher.launch_together(chosen)

            stopwatch = Stopwatch([entry[2] for entry in everyone])
            stopwatch.time(launch(0), 2)
            stopwatch.time(launch(1), 2)
            times = stopwatch.bursts({"plain": launch(0), "traced": launch(1)}, REPEATS)
        times = group.exchange("times", times)[0]
        assert all(lane.lost == 0 for lane in tracer.read()), "an event that is only counted would cost less"
        return times

    times = mk.spawn(on_rank, gpus_per_node=RANKS, device="cuda", links=LINKS, timeout=60.0)[0]
    cost = times["traced"] / times["plain"] - 1
    print(f"{op}: plain {times['plain']:.4f} ms, traced {times['traced']:.4f} ms, cost {cost:.2%}")
    assert cost < 0.03


def test_several_nodes():
    """The loopback network between nodes: everything is traced but the network itself."""

    def on_rank(group):
        call = workload_of("all_gather_matmul").make(group, (2048, 512, 1024), torch.bfloat16)
        call.run(None)
        with mk.trace(events=1):
            call.run(None)
        with mk.trace() as trace:
            call.run(None)
        return trace

    trace = mk.spawn(on_rank, nodes=2, gpus_per_node=2, device="cuda")[0]
    for rank in range(4):
        assert {event.peer for event in trace.of(rank, "tile")} == {0, 1, 2, 3}
        assert trace.of(rank, "send")
        assert trace.of(rank, "post")
    assert all(sent.start <= seen.end + CLOCK for sent, seen in arrivals(trace))


def test_a_traced_call_is_not_captured():
    def on_rank(group):
        call = workload_of("all_gather_matmul").make(group, (256, 512, 128), torch.bfloat16)
        call.run(None)
        group.synchronize()
        stream = torch.cuda.current_stream()
        with mk.trace():
            call.run(None)
            group.synchronize()
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
                torch.zeros(1, device=group.device)
                with pytest.raises(mk.ArgumentError, match="cannot be captured"):
                    call.run(None)

    mk.spawn(on_rank, gpus_per_node=1, device="cuda")
