"""mkernel tune from end to end, in the simulator: only the stopwatch and the names of GPUs are made up."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

import mkernel as mk
from mkernel import cli
from mkernel.runtime import tuned
from mkernel.tuning import measuring
from mkernel.workloads import WORKLOADS, tunable

PLACE = "a GPU of paper"


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
        arguments = launches[0].arguments
        return 1.0 + 0.1 * (6 - launches[0].grid) + 0.05 * (arguments["GROUP"] != 4) + 64 / arguments["TILE_N"]

    monkeypatch.setattr(measuring, "spawn", spawn)
    monkeypatch.setattr(measuring.Trial, "_time", time)
    return measured


def run(*arguments):
    result = CliRunner(env={"COLUMNS": "160", "TERM": "dumb", "NO_COLOR": "1"}).invoke(cli.main, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("op", tunable())
def test_the_best_is_kept_and_taken(paper, op):
    result = run("tune", op, "64x64x64", "--ranks", "2", "--seconds", "20")
    assert result.exit_code == 0
    found = re.search(r"64x64x64 +([\d.]+) +([\d.]+) +([\d.]+) +(\d+).* +(\S.*)", result.output)
    default, best, worst = (float(found.group(i)) for i in (1, 2, 3))
    assert best < default
    assert best < 0.9 * worst
    assert "emulated" in result.output
    assert len(paper) >= int(found.group(4)) > 5
    told = json.loads(tuned.path().read_text())
    own = next(entry for entry in told["entries"].values() if "with" in entry)
    assert own["milliseconds"] == pytest.approx(best, abs=1e-3)
    assert own["config"]["group_m"] == 4

    def on_rank(group):
        group.tuned = tuned.Table(PLACE, tuned.read(tuned.path()))
        call = WORKLOADS[op].make(group, (64, 64, 64), torch.bfloat16)
        call.run(None)
        a = torch.ones(*((32, 64) if op == "all_gather_matmul" else (64, 32)), dtype=torch.bfloat16)
        plan = mk.explain(op, a, torch.ones(a.shape[1], 64, dtype=torch.bfloat16))
        return str(plan).splitlines()[-1], plan.config.group_m, plan.config.tile_n

    for line, group_m, tile_n in mk.spawn(on_rank, gpus_per_node=2, device="cpu"):
        assert line == "- configuration: tuned"
        assert group_m == 4
        assert tile_n == (own["config"] | own["with"])["tile_n"]


@pytest.mark.usefixtures("paper")
def test_configurations_that_are_refused_are_passed_over(monkeypatch):
    from mkernel.runtime.config import Config
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

    monkeypatch.setattr(cli, "_links", lambda *_: mk.Links(nvlink=225.0))
    workload = WORKLOADS["all_gather_matmul"]
    monkeypatch.setitem(WORKLOADS, workload.op, type(workload)(**{**vars(workload), "make": wrong}))
    with pytest.raises(mk.MKernelError, match="gives another result than the default"):
        measuring.tune(
            WORKLOADS["all_gather_matmul"], (64, 64, 64), nodes=1, gpus_per_node=2, dtype=torch.bfloat16,
            links=mk.Links(nvlink=225.0), seconds=20.0,
        )  # fmt: skip
    assert tuned.read(tuned.path()) == {}


def test_without_a_gpu():
    result = run("tune", "all_gather_matmul")
    assert result.exit_code == 1
    assert "needs a GPU; there is none here" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all_gather"], "there is no operator"),
        (["all_gather_matmul", "1x2"], "is no shape"),
        (
            ["matmul_all_reduce", "8x8x9"],
            r"k of matmul_all_reduce \(9\) must be divisible by the number of ranks \(4\)",
        ),
        (["ring_attention"], "ring_attention is not tuned; those that are: all_gather_matmul"),
        (["all_gather_matmul", "--seconds", "0"], "--seconds"),
    ],
)
def test_refusals(arguments, message):
    result = run("tune", *arguments)
    assert result.exit_code == 2
    assert re.search(message, re.sub(r"[\s│╭╮╰╯─]+", " ", result.output))
