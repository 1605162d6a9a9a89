"""mkernel tune from end to end, in the simulator: only the stopwatch and the names of GPUs are made up."""

import contextlib
import functools
import json
import re
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from support.workloads import workload_of
from typer.testing import CliRunner

import mkernel as mk
from mkernel import cli, operators
from mkernel.compiling import pretending
from mkernel.runtime import tuned
from mkernel.runtime.config import Config
from mkernel.tuning import measuring
from mkernel.tuning.search import Search

WORKLOADS = {name: workload_of(name) for name in operators.registered("workload")}
PLACE = "a GPU of paper"
CTAS = 6  # that a simulated rank has
SHAPES = {
    "ring_attention": (1, 2, 128, 64),
    "ring_attention_backward": (1, 2, 128, 64),
    "moe_dispatch_matmul": (32, 64, 32),
    "moe_dispatch_scaled_matmul": (32, 64, 32),
    "moe_dispatch": (32, 32),
    "moe_combine": (16, 32),
    "moe_ffn": (16, 32, 16),
    "scaled_moe_ffn": (16, 128, 32),
}
ALL = [pytest.param(op, SHAPES.get(op, (64, 64, 64)), id=op) for op in WORKLOADS]


@pytest.fixture
def paper(monkeypatch, tmp_path):
    """A machine whose times follow from the configuration; the launches are made and checked for real."""
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "tuned.json"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "a stream")
    monkeypatch.setattr(tuned, "place_of", lambda group: PLACE)
    measured = []

    def spawn(function, *, nodes, gpus_per_node, device, links, timeout):
        assert (device, links.nvlink) == ("cuda", 450 / (nodes * gpus_per_node))
        return mk.spawn(function, nodes=nodes, gpus_per_node=gpus_per_node, device="cpu")

    def time(trial, everyone):
        launches = [launch for launch, _ in everyone]
        assert len({launch.grid for launch in launches}) == 1, "all ranks prepared the same configuration"
        measured.append(launches[0])
        return time_of(launches[0])

    monkeypatch.setattr(measuring, "begin_to_compile", lambda launch: None)
    monkeypatch.setattr(measuring, "spawn", spawn)
    monkeypatch.setattr(measuring.Trial, "_time", time)
    return measured


def fields_of(arguments):
    """What a kernel is told, in structures too: names and values."""
    for name, value in arguments.items():
        if hasattr(value, "_asdict"):
            yield from fields_of(value._asdict())
        else:
            yield name, getattr(value, "value", value)  # of a constant


def time_of(launch):
    """Milliseconds on that machine: it likes many CTAs, wide tiles, eight warps and groups of 4 blocks."""
    told = dict(fields_of(launch.arguments))
    columns = told.get("TILE_N", told.get("N", 64))
    time = 1.0 + 0.1 * (CTAS - launch.grid) + 0.05 * (told.get("GROUP", 4) != 4) + 64 / columns
    return time + 0.2 * (launch.options["num_warps"] != 8)


def run(*arguments):
    result = CliRunner(env={"COLUMNS": "160", "TERM": "dumb", "NO_COLOR": "1"}).invoke(cli.main, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# the file, the search and the messages are the same for all operators
some = [
    case if case.id == "matmul_reduce_scatter" else pytest.param(*case.values, id=case.id, marks=pytest.mark.thorough)
    for case in ALL
]


@pytest.mark.parametrize(("op", "shape"), some)
def test_the_best_is_kept_and_taken(paper, op, shape):
    """By ranks that have the file, with the right results: `mkernel tune` compares them with the default's."""
    name = "x".join(map(str, shape))
    result = run("tune", op, name, "--ranks", "2", "--seconds", "20")
    assert result.exit_code == 0
    found = re.search(rf"{name} +([\d.]+) +([\d.]+) +([\d.]+) +(\d+).* +(\S.*)", result.output)
    default, best, worst = (float(found.group(i)) for i in (1, 2, 3))
    assert best < default
    assert best < 0.9 * worst
    assert "emulated" in result.output
    assert len(paper) >= int(found.group(4)) > 5
    told = json.loads(tuned.path().read_text())
    assert len(told["entries"]) == (1 if op.startswith("ring_attention") else 2)
    kept = functools.reduce(lambda one, other: one | other["config"], told["entries"].values(), {})
    assert kept["warps"] == 8
    assert all(entry["milliseconds"] == pytest.approx(best, abs=1e-3) for entry in told["entries"].values())

    def on_rank(group):
        options = dict(causal=False) if op.startswith("ring_attention") else {}
        call = WORKLOADS[op].make(group, shape, torch.bfloat16, **options)
        default = call.run(Config()).clone()
        assert str(call.tried.explain(None)).endswith("- configuration: default")
        group.tuned = tuned.Table(PLACE, tuned.read(tuned.path()))
        chosen = call.run(None)
        error = (chosen.double() - default.double()).abs().max()
        assert error <= 8 * torch.finfo(torch.bfloat16).eps * default.abs().max()
        assert str(call.tried.explain(None)).endswith("- configuration: tuned")
        return time_of(call.tried.prepare(None))

    assert mk.spawn(on_rank, gpus_per_node=2, device="cpu") == [pytest.approx(best, abs=1e-3)] * 2


@pytest.mark.parametrize(("op", "shape"), some)
def test_what_was_compiled_before_is_what_is_measured(paper, monkeypatch, op, shape):
    """For every rank: to measure a configuration would find nothing to compile, unless it is a field's only one."""
    compiled = []
    monkeypatch.setattr(measuring, "begin_to_compile", compiled.append)
    measuring.tune(
        WORKLOADS[op], shape, nodes=1, gpus_per_node=2, dtype=torch.bfloat16, links=mk.Links(nvlink=225.0), seconds=20.0
    )
    assert {launch.group.rank for launch in compiled} == {0, 1}
    known = {(launch.kernel, launch.variant) for launch in compiled}
    assert len(known) > 3
    unknown = [launch for launch in paper if (launch.kernel, launch.variant) not in known]
    assert len(unknown) < len(paper) / 2


@triton.jit
def small_kernel(out, VALUE: tl.constexpr):
    tl.store(out, VALUE)


@triton.jit
def broken_kernel(out, VALUE: tl.constexpr):
    tl.static_assert(VALUE < 0)
    tl.store(out, VALUE)


def test_configurations_are_compiled_side_by_side(monkeypatch):
    """Each binary once, whatever becomes of the others; for a GPU that is not there."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    group = SimpleNamespace(rank=0, device="a GPU", exchange=lambda what, told: [told, told])

    def prepare(config):
        if config.ctas == 1:
            raise mk.ArgumentError("not so few")
        kernel = broken_kernel if config.ctas == 2 else small_kernel
        arguments = dict(out=torch.empty(1, dtype=torch.int32), VALUE=config.ctas)
        return measuring.Launch("an operator", group, kernel, 1, arguments, dict(num_warps=config.warps))

    trial = measuring.Trial(group, SimpleNamespace(tried=SimpleNamespace(prepare=prepare)))
    configs = [Config(ctas=ctas, warps=warps) for ctas in (1, 2, 3, 4) for warps in (1, 2)]
    with pretending(90):
        for kernel in (small_kernel, broken_kernel):
            kernel.device_caches.clear()
        trial.compile(configs)
        assert len(small_kernel.device_caches[0][0]) == 4
        assert not broken_kernel.device_caches[0][0]
        for kernel in (small_kernel, broken_kernel):
            kernel.device_caches.clear()


@pytest.mark.usefixtures("paper")
@pytest.mark.parametrize(("op", "shape"), ALL)
def test_a_search_ends_in_time(monkeypatch, op, shape):
    """Every measurement takes 2 seconds of a clock that nothing else advances."""
    now = [0.0]
    measure = measuring.Trial._time

    def slow(trial, everyone):
        now[0] += 2.0
        return measure(trial, everyone)

    monkeypatch.setattr(measuring.Trial, "_time", slow)
    monkeypatch.setattr(measuring.Trial, "_compare", lambda trial, config: None)
    monkeypatch.setattr(measuring, "Search", functools.partial(Search, clock=lambda: now[0]))
    found = measuring.tune(
        WORKLOADS[op], shape, nodes=1, gpus_per_node=2, dtype=torch.bfloat16, links=mk.Links(nvlink=225.0), seconds=9.0
    )
    assert not found.result.complete
    assert len(found.result.trials) == 5
    # what was under way when the time was over, and the best and the default again, by turns
    assert now[0] <= 10.0 + 2 * 2 * 2.0


@pytest.mark.usefixtures("paper")
def test_configurations_that_are_refused_are_passed_over(monkeypatch):
    from mkernel.tuning.search import Family

    axes = dict(group_m=(4,), ctas=(1000,))
    monkeypatch.setattr(measuring, "families_of", lambda op, group, plan: [Family(Config(), axes)])
    found = measuring.tune(
        WORKLOADS["all_gather_matmul"], (64, 64, 64), nodes=1, gpus_per_node=2, dtype=torch.bfloat16,
        links=mk.Links(nvlink=225.0), seconds=20.0,
    )  # fmt: skip
    assert found.result.trials[Config(group_m=4, ctas=1000)] is None
    assert found.result.best == Config(group_m=4)


@pytest.mark.usefixtures("paper")
def test_a_wrong_result_is_not_kept(monkeypatch):
    made = WORKLOADS["all_gather_matmul"].make

    def wrong(group, shape, dtype):
        call = made(group, shape, dtype)

        def broken(config):
            result = call.run(config)
            if config is not None and config.group_m == 4 and group.rank == 1:
                result[3, 3] += 5
            return result

        return measuring.Call(broken, call.tried)

    monkeypatch.setattr(cli, "shared_links", lambda *_: mk.Links(nvlink=225.0))
    workload = WORKLOADS["all_gather_matmul"]
    monkeypatch.setitem(WORKLOADS, workload.op, type(workload)(**{**vars(workload), "make": wrong}))
    with pytest.raises(mk.MKernelError, match="gives a different result than the default"):
        measuring.tune(
            WORKLOADS["all_gather_matmul"], (64, 64, 64), nodes=1, gpus_per_node=2, dtype=torch.bfloat16,
            links=mk.Links(nvlink=225.0), seconds=20.0,
        )  # fmt: skip
    assert tuned.read(tuned.path()) == {}


@pytest.mark.usefixtures("paper")
def test_what_a_call_is_like_can_be_said():
    arguments = ["tune", "ring_attention", "1x2x128x64", "--ranks", "2", "--seconds", "1"]
    result = run(*arguments, "--kv-heads", "1", "--zigzag")
    assert result.exit_code == 0
    ((key, entry),) = tuned.read(tuned.path()).items()
    assert "causal no" in key
    assert "kv_heads 1 ragged" in key
    assert "zigzag yes" in key
    assert entry["options"] == {"causal": False, "zigzag": True, "kv_heads": 1}
    result = run(*arguments, "--kv-heads", "3")
    assert result.exit_code == 1
    assert "query has 2 heads, which is not a multiple of key's 3" in result.output
    result = run("tune", "moe_ffn", "16x16x16", "--ranks", "2", "--experts", "1", "--topk", "3")
    assert result.exit_code == 1
    assert "a token cannot have 3 experts: there are 2, 1 on each rank" in result.output


def test_without_a_gpu():
    result = run("tune", "all_gather_matmul")
    assert result.exit_code == 1
    assert "needs a GPU; this machine has none" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all_gather"], "there is no operator"),
        (["all_gather_matmul", "1x2"], "is not a shape"),
        (
            ["matmul_all_reduce", "8x8x9"],
            r"k of matmul_all_reduce \(9\) must be divisible by the number of ranks \(4\)",
        ),
        (["ring_attention", "8x8x8"], "is not a shape of ring_attention; write batch x heads x positions x dim"),
        (["moe_combine", "9x8"], r"tokens of moe_combine \(9\) must be divisible by the number of ranks \(4\)"),
        (["moe_ffn", "--causal"], "--causal.* moe_ffn has no such option"),
        (["ring_attention", "--topk", "4"], "--topk.* ring_attention has no such option"),
        (["all_gather_matmul", "--kv-heads", "4"], "--kv-heads.* all_gather_matmul has no such option"),
        (["moe_dispatch_matmul", "--topk", "17"], "--topk"),
        (["all_gather_matmul", "--seconds", "0"], "--seconds"),
    ],
)
def test_refusals(arguments, message):
    result = run("tune", *arguments)
    assert result.exit_code == 2
    assert re.search(message, re.sub(r"[\s│╭╮╰╯─]+", " ", result.output))
