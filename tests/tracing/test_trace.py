"""Traces of the simulator: complete, in order, and no trace of them when they are off."""

import importlib
import io
import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from rich.console import Console
from support import operator_calls
from support.workloads import workload_of

import mkernel as mk
from mkernel.lang.trace import _fits
from mkernel.runtime import clocks
from mkernel.sim.backend import SimLauncher
from mkernel.tracing import chrome
from mkernel.tracing.command import WIDE, bars, show, show_account
from mkernel.tracing.links import arrivals

ROOT = Path(__file__).parent.parent.parent
CASE = operator_calls.Case(25, 24, 24, torch.bfloat16)
CONFIG = mk.Config(tile_m=16, tile_n=16, tile_k=16, chunk_rows=8)
ROW_BLOCKS, COLUMN_BLOCKS, CHUNKS = 2, 2, 4


def traced(group, calls=1, room=4096):
    with mk.trace(events=room) as trace:
        for turn in range(calls):
            operator_calls.call(group, CASE, turn, config=CONFIG)
    return trace


@pytest.fixture(scope="module")
def trace():
    """Two calls on two nodes of two ranks."""
    return operator_calls.run(traced, 2, cluster=(2, 2), seed=5)[0]


def inside(event, outer):
    return outer.start <= event.start <= event.end <= outer.end


def test_results_do_not_change_and_every_rank_has_the_whole_trace():
    def on_rank(group):
        before = operator_calls.call(group, CASE, config=CONFIG)
        with mk.trace() as trace:
            during = operator_calls.call(group, CASE, config=CONFIG)
        assert group.tracer is None
        operator_calls.assert_same(during, before)
        operator_calls.assert_same(operator_calls.call(group, CASE, config=CONFIG), before)
        assert {event.index for event in trace.of(group.rank, "launch")} == {2}, "only the second epoch"
        return trace

    first, second = operator_calls.run(on_rank, cluster=(1, 2))
    assert first.events == second.events
    assert {event.rank for event in first.events} == {0, 1}


@pytest.mark.parametrize("pieces", [1, 7])
def test_the_account_of_a_call_has_all_of_its_time(trace, pieces):
    start, end = trace.span(3, 1)
    lines = trace.account(3, 1, pieces)
    assert [line["cta_ms"] for line in lines] == sorted((line["cta_ms"] for line in lines), reverse=True)
    found = {(line["role"], line["kind"]): line for line in lines}
    events = [event for event in trace.of(3, call=1) if event.kind != "launch"]
    assert set(found) == {(event.role, event.kind) for event in events}
    for (role, kind), line in found.items():
        alike = [event for event in events if (event.role, event.kind) == (role, kind)]
        assert line["count"] == len(alike)
        assert line["cta_ms"] == pytest.approx(sum(event.duration for event in alike) / 1e6)
        assert line["longest_us"] == max(event.duration for event in alike) / 1e3
        assert 0 <= line["median_us"] <= line["longest_us"]
        assert 0 <= line["first_ms"] <= line["last_ms"] <= (end - start) / 1e6
        assert len(line["busy"]) == pieces
        assert sum(line["busy"]) * (end - start) / pieces == pytest.approx(line["cta_ms"] * 1e6)


@pytest.mark.parametrize("width", [80, WIDE])
def test_bars_where_there_is_room_for_them(trace, width):
    assert bars([0, 0.01, 1, 2, 4], 4) == " ▁▂▄█"
    console = Console(width=width, file=io.StringIO())
    show_account(trace, 0, console)
    lines = console.file.getvalue().splitlines()
    assert max(len(line) for line in lines) <= width
    assert any("wait for arrived" in line for line in lines)
    assert ("CTAs at it" in lines[1]) == (width == WIDE)


def test_every_tile_and_every_chunk_is_there_once(trace):
    for rank in range(4):
        for call in range(2):
            tiles = Counter((event.peer, event.role) for event in trace.of(rank, "tile", call=call))
            assert tiles == {(source, "compute"): ROW_BLOCKS * COLUMN_BLOCKS for source in range(4)}
            own, counterpart = rank, (rank + 2) % 4
            pushes = Counter((event.peer, event.index) for event in trace.of(rank, "push", call=call))
            assert pushes == {(source, chunk): 1 for source in (own, counterpart) for chunk in range(CHUNKS)}
            sends = Counter((event.peer, event.index) for event in trace.of(rank, "send", call=call))
            assert sends == {(rank, chunk): 1 for chunk in range(CHUNKS)}
            waited = {(event.peer, event.index) for event in trace.of(rank, "wait for arrived", call=call)}
            assert {(source, chunk) for source in range(4) for chunk in range(CHUNKS) if source != rank} <= waited


def test_launches_are_whole_and_hold_everything_else(trace):
    for rank in range(4):
        launches = {(event.cta, event.call): event for event in trace.of(rank, "launch")}
        assert set(launches) == {(cta, call) for cta in range(6) for call in range(2)}
        assert [launches[0, call].index for call in range(2)] == [1, 2], "epochs"
        for event in trace.of(rank):
            assert event.op == "all_gather_matmul"
            assert inside(event, launches[event.cta, event.call])
        assert trace.calls(rank) == ["all_gather_matmul"] * 2


def test_nobody_sees_a_chunk_before_it_was_written(trace):
    pairs = list(arrivals(trace))
    assert len(pairs) == 2 * 4 * 3 * CHUNKS  # calls, ranks, other ranks
    for sent, seen in pairs:
        assert sent.rank != seen.rank
        assert sent.end <= seen.end, "a signal is seen after it was raised"
        assert (sent.peer, sent.index, sent.call) == (seen.peer, seen.index, seen.call)


def test_transfers_are_those_that_were_posted(trace):
    for rank in range(4):
        posted = sorted(event.index for event in trace.of(rank, "post"))
        carried = sorted(transfer.ticket for transfer in trace.transfers if transfer.source == rank)
        assert carried == posted
        assert {transfer.target for transfer in trace.transfers if transfer.source == rank} == {(rank + 2) % 4}
    assert sum(transfer.nbytes for transfer in trace.transfers) == 2 * 4 * 25 * 24 * 2
    assert all(transfer.start < transfer.end for transfer in trace.transfers)


def test_copies_and_tiles_overlap(trace):
    for rank in range(4):
        assert trace.overlap(rank, 0) > 0.2
        start, end = trace.span(rank, 0)
        busy = trace.busy(rank, 0)
        assert set(busy) == set(range(6))
        assert all(0 < spent <= end - start for spent in busy.values())
    assert trace.simulated
    assert not trace.emulated
    assert (trace.clock_error, trace.lost) == (0, 0)
    assert len(trace.summary()) == 8


@pytest.mark.thorough
def test_a_traced_call_explores_the_same_schedules():
    """The results are right with a straggler, a late rank, and CTAs that run one after the other."""
    for options in (dict(slow={1: 0.05}), dict(late={0: 300}), dict(resident=1)):
        trace = operator_calls.run(traced, cluster=(2, 2), seed=9, **options)[0]
        assert all(sent.end <= seen.end for sent, seen in arrivals(trace))


def test_events_without_room_are_counted():
    full = operator_calls.run(traced, cluster=(1, 2))[0]
    short = operator_calls.run(traced, 1, 3, cluster=(1, 2))[0]
    assert len(short.events) < len(full.events)
    assert short.lost == sum(max(count - 3, 0) for count in lanes(full).values())
    assert set(lanes(short).values()) <= {1, 2, 3}
    assert all(event in Counter(name(one) for one in full.events) for event in map(name, short.events))


def lanes(trace):
    return Counter((event.rank, event.cta, event.lane) for event in trace.events if event.kind != "launch")


def name(event):
    return (event.rank, event.cta, event.lane, event.kind, event.peer, event.index)


@triton.jit
def always_fits(offset, words):
    return offset > 0


def test_without_the_bound_events_are_written_elsewhere():
    operator_calls.run(traced, 3, 3, cluster=(1, 2))
    with pytest.raises(mk.SimulatorError, match="outside of every tensor"):
        operator_calls.run(traced, 3, 3, cluster=(1, 2), replace={_fits: always_fits})


def test_a_rank_alone():
    trace = operator_calls.run(traced, cluster=(1, 1))[0]
    assert {event.kind for event in trace.events} == {"launch", "tile"}
    assert math.isnan(trace.overlap(0, 0)), "there was nothing to overlap"


def test_ranks_that_fail_keep_their_own_events():
    kept = {}

    def on_rank(group):
        operator_calls.call(group, CASE, config=CONFIG)
        try:
            with mk.trace() as trace:
                operator_calls.call(group, CASE, config=CONFIG)
                if group.rank == 0:
                    operator_calls.call(group, CASE, config=CONFIG)
                else:
                    raise ValueError("left early")
        except (mk.CommTimeout, ValueError):
            kept[group.rank] = trace
            assert group.tracer is None

    operator_calls.run(on_rank, cluster=(1, 2), timeout=1e-4)
    assert {event.rank for event in kept[0].events} == {0}
    assert kept[0].calls() == ["all_gather_matmul"] * 2
    longest = max((event for event in kept[0].events if event.waits), key=lambda event: (event.call, event.duration))
    assert (longest.call, longest.peer) == (1, 1)
    assert {event.rank for event in kept[1].events} == {1}


def test_refusals():
    def on_rank(group):
        with pytest.raises(mk.ArgumentError, match="events must be an integer"):
            mk.trace(events=0)
        with mk.trace() as trace, pytest.raises(mk.ArgumentError, match="already being traced"):
            mk.trace().__enter__()
        with pytest.raises(mk.MKernelError, match="the trace is empty"):
            trace.save("nowhere.json")
        with pytest.raises(mk.ArgumentError, match="has no call 0"):
            trace.span(0, 0)

    operator_calls.run(on_rank)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)])
def test_operators_that_sum_over_ranks(op, cluster):
    """Tiles have no time of their own to begin with: they begin when the event before them ended."""

    def on_rank(group):
        call = workload_of(op).make(group, (128, 128, 64), torch.bfloat16)
        before = call.run(None).clone()
        with mk.trace() as trace:
            for _ in range(2):
                operator_calls.assert_same(call.run(None), before)
        return trace

    trace = operator_calls.run(on_rank, cluster=cluster)[0]
    for rank in range(2):
        assert trace.calls(rank) == [op] * 2
        for call in range(2):
            tiles = trace.of(rank, "tile", call=call)
            assert len({(event.peer, event.index) for event in tiles}) == len(tiles) == 16
            assert trace.of(rank, "reduce", call=call)
            start, end = trace.span(rank, call)
            assert all(start <= event.start <= event.end <= end for event in tiles)
            by_cta = [[event for event in trace.of(rank, call=call) if event.cta == cta and event.lane == "tiles"]
                      for cta in trace.busy(rank, call)]  # fmt: skip
            for events in by_cta:
                assert all(one.end <= other.start for one, other in itertools.pairwise(events))
    # a part that is there when it is looked for is no event
    waits = [event for rank in range(2) for event in trace.of(rank, "wait for partial")]
    assert waits
    assert all(event.duration > 0 for event in waits)
    if cluster == (1, 2):
        assert trace.of(0, "push")
    else:
        assert sorted(transfer.ticket for transfer in trace.transfers if transfer.source == 0) == sorted(
            event.index for event in trace.of(0, "post")
        )


def test_a_sum_in_slices():
    def on_rank(group):
        call = workload_of("matmul_all_reduce").make(group, (64, 64, 32), torch.bfloat16)
        assert call.tried.explain(None).sliced
        with mk.trace() as trace:
            call.run(None)
        return trace

    trace = operator_calls.run(on_rank, cluster=(1, 2))[0]
    for cta in range(4):
        kinds = [event.kind for event in trace.of(0) if event.cta == cta and event.lane == "tiles"]
        assert kinds == ["tile", "push", "reduce", "gather"]


@pytest.mark.parametrize("fixed_order", [True, False])
def test_a_sum_with_multicast(monkeypatch, fixed_order):
    module = importlib.import_module("mkernel.ops.reduce.all_reduce.plan")
    monkeypatch.setattr(module, "LARGEST_SLICED", 0)

    def on_rank(group):
        a, b = torch.ones(64, 32).bfloat16(), torch.ones(32, 64).bfloat16()
        assert mk.explain("matmul_all_reduce", a, b).multicast
        with mk.trace() as trace:
            y = mk.matmul_all_reduce(a, b, fixed_order=fixed_order, config=mk.Config(tile_m=16, tile_n=16, ctas=1))
        assert (y == 32 * group.size).all()
        return trace

    trace = operator_calls.run(on_rank, cluster=(1, 4), multicast=True)[0]
    kinds = [event.kind for event in trace.of(0) if event.lane == "tiles"]
    # three tiles of a block are for others, the last is the own one; those of the block before are copied then
    first, later = ["tile", "push"] * 3 + ["tile", "reduce"], ["tile", "push"] * 3 + ["tile", "reduce", "gather"]
    assert kinds == first + later * 3 + ["gather"]


@pytest.mark.parametrize(
    ("op", "kinds"),
    [
        ("ring_attention", {"tile", "send", "post", "wait for arrived"}),
        ("moe_dispatch_matmul", {"tile", "gather", "send", "post", "wait for placed", "wait for held"}),
        ("moe_ffn", {"tile", "gather", "reduce", "send", "post", "wait for computed", "wait for back"}),
    ],
)
def test_other_operators(op, kinds):
    def on_rank(group):
        call = workload_of(op).make(group, workload_of(op).smallest(group.size), torch.bfloat16)
        with mk.trace() as trace:
            call.run(None)
        return trace

    trace = operator_calls.run(on_rank, cluster=(2, 1))[0]
    assert trace.lost == 0
    assert kinds <= {event.kind for event in trace.events}
    for rank in range(2):
        assert trace.calls(rank) == [op]
        tiles = [event.index for event in trace.of(rank, "tile")]
        assert len(set(tiles)) == len(tiles) > 0
        launches = {event.cta: event for event in trace.of(rank, "launch")}
        assert all(inside(event, launches[event.cta]) for event in trace.of(rank))
    for event in chrome.events_of(trace):
        assert event["ph"] != "X" or event["dur"] >= 0


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_all_reduce", "ring_attention", "moe_ffn"])
def test_roles_have_the_names_of_the_documentation(op):
    """Those of docs/concepts.md, in events, in the account, and in the names of Perfetto's threads."""

    def on_rank(group):
        call = workload_of(op).make(group, workload_of(op).smallest(group.size), torch.bfloat16)
        with mk.trace() as trace:
            call.run(None)
        return trace

    documented = re.findall(
        r"^\| `(\w+)` \| ", (ROOT / "docs/concepts.md").read_text().split("## Roles")[1][:900], re.M
    )
    assert documented == ["send", "intra", "compute"]
    trace = operator_calls.run(on_rank, cluster=(2, 1))[0]
    assert {event.role for event in trace.events if event.kind != "launch"} <= set(documented)
    assert {event.role for event in trace.events if event.kind == "tile"} == {"compute"}
    assert {line["role"] for line in trace.account(0, 0)} <= set(documented)
    threads = [event["args"]["name"] for event in chrome.events_of(trace) if event["name"] == "thread_name"]
    named = [re.fullmatch(r"CTA \d+(?: (\w+)(?:, tiles)?)?|network to rank \d+", name) for name in threads]
    assert all(named), threads
    assert {match.group(1) for match in named} - {None} <= set(documented)


def test_no_copies_have_no_share(tmp_path):
    trace = operator_calls.run(traced, cluster=(1, 1))[0]
    assert f"{trace.overlap(0, 0):.0%}" == "-"
    console = Console(width=200, file=io.StringIO())
    show(trace, tmp_path / "a.json", tmp_path / "a.html", console)
    (line,) = [line for line in console.file.getvalue().splitlines() if re.match(r" +0 +0 ", line)]
    assert line.split()[-1] == "-"
    assert "copies behind tiles: the share of the time in which CTAs of a rank copy" in console.file.getvalue()
    written = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert written["otherData"]["summary"][0]["copies_hidden"] is None
    assert "nan" not in (tmp_path / "a.html").read_text().split('id="data"')[-1].split("</script>")[0].lower()


# -- for Perfetto


def test_file_for_perfetto(trace, tmp_path):
    trace.save(tmp_path / "trace.json")
    told = json.loads((tmp_path / "trace.json").read_text())
    assert told["otherData"]["simulated"] is True
    events = told["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(trace.events)
    names = {(event["pid"], event.get("tid")): event["args"] for event in events if event["ph"] == "M"}
    assert all((event["pid"], event["tid"]) in names for event in slices)
    threads = {}
    for event in slices:
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for of_thread in threads.values():
        assert_nested(of_thread)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(starts) == set(ends)
    assert len(starts) == len(list(arrivals(trace)))
    assert sum(event["ph"] == "b" for event in events) == len(trace.transfers)


def assert_nested(slices):
    """Slices of a thread lie beside or inside each other."""
    open_until = []
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        end = event["ts"] + event["dur"]
        while open_until and open_until[-1] <= event["ts"] + 1e-9:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 1e-9
        open_until.append(end)


def test_threads_have_their_own_numbers():
    numbers = [chrome.thread(cta, role) for cta in range(200) for role in (*chrome.LANES, "another")]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) > 0
    assert max(numbers) < chrome.NETWORK


# -- clocks


def test_a_clock_beside_the_hosts():
    readings = [(1000, 5_000_900, 2000), (3000, 5_003_020, 3100), (4000, 5_004_900, 5000)]
    assert clocks.between(readings) == clocks.Offset(5_003_020 - 3050, 50)


def test_hosts_meet_at_barriers():
    generator = torch.Generator().manual_seed(1)

    def random(most):
        return int(torch.randint(1, most, (), generator=generator))

    for ahead in (-(10**9), 0, 12345):
        mine, theirs = [], []
        for i in range(20):
            came = [10**6 * i + random(50_000) for _ in range(2)]
            left = [max(came) + random(30_000) for _ in range(2)]
            mine.append((came[0] + ahead, left[0] + ahead))
            theirs.append((came[1], left[1]))
        found = clocks.hosts_between(mine, theirs)
        assert abs(found.nanoseconds - ahead) <= found.error <= 40_000


def test_offsets_of_ranks_with_several_clocks(monkeypatch):
    """Ranks 0 and 1 read one clock, 2 and 3 another one, which is ahead."""
    ahead = {0: 10**12, 1: 10**12, 2: 10**12 + 70_000, 3: 10**12 + 70_000}

    def on_rank(group):
        return clocks.offsets(group)

    def clock(_, rank):
        readings = [(0, ahead[rank], 900), (2000, ahead[rank] + 2100, 2200)]
        return SimpleNamespace(name=rank // 2, compare=lambda: readings)

    monkeypatch.setattr(SimLauncher, "clock", clock)
    for found in operator_calls.run(on_rank, cluster=(1, 4)):
        assert found[0] == found[1] == clocks.Offset(0, 0)
        assert found[2] == found[3] == clocks.Offset(70_000, 200)
