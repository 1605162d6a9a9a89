"""mkernel check: operators and functions of a user under many schedules; what is printed, and exit codes."""

import dataclasses
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from support.patience import HANG
from test_cli import run, words

import mkernel as mk
from mkernel import checking, estimates, operators
from mkernel.demo.case import Case, Demo
from mkernel.sim.explore import Exploration, Report

SMALL = ("--nodes", "1", "--shape", "32x16x16", "--calls", "1")


def test_an_operator_is_checked():
    result = run("check", "all_gather_matmul", *SMALL, "--schedules", "9", "--random", "2", "--seed", "5")
    assert result.exit_code == 0
    assert "11 schedules of 1 x 2 ranks" in result.stdout
    assert "(7 named, 2 with stalls, 2 random), all passed" in result.stdout
    assert "preemption points:" in result.stdout


@pytest.mark.parametrize("op", list(operators.registered("demo", "workload")))
@pytest.mark.thorough
def test_every_operator_can_be_checked(op):
    """With the shape that is the default on two ranks."""
    result = run("check", op, "--nodes", "2", "--gpus-per-node", "1", "--schedules", "6")
    assert result.exit_code == 0, result.output
    assert "6 schedules of 2 x 1 ranks" in result.stdout


def test_operators_whose_ctas_wait_for_each_other_have_no_schedule_with_one():
    needs_all = {name for name, operator in operators.registered().items() if operator.co_resident}
    assert needs_all == {
        "all_gather_matmul_weight_grad",
        "ring_attention_backward",
        "moe_dispatch_matmul",
        "moe_dispatch_scaled_matmul",
        "moe_dispatch",
        "moe_combine",
        "moe_ffn",
        "scaled_moe_ffn",
    }
    ran = []

    def note(exploration, replay, console):
        exploration._points = []
        ran.append(set(exploration._without))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "run", note)
        assert run("check", "moe_ffn").exit_code == 0
        assert run("check", "all_gather_matmul").exit_code == 0
    assert ran == [{"one-cta"}, set()]


@pytest.fixture
def wrong_when_slow(monkeypatch):
    """all_gather_matmul with a wrong element on rank 1 if rank 1 is slow."""
    real = mk.all_gather_matmul

    def wrong(a, b):
        y = real(a, b)
        group = mk.runtime.group.current()
        if group.rank == 1 and group.world.options.schedule == "slow:1":
            y[3, 4] += 1000
        return y

    monkeypatch.setattr("mkernel.ops.all_gather_matmul.demo.all_gather_matmul", wrong)


@pytest.mark.usefixtures("wrong_when_slow")
def test_the_first_failure_ends_it_and_its_command_replays_it():
    result = run("check", "all_gather_matmul", *SMALL)
    assert result.exit_code == 1
    assert "all_gather_matmul, rank 1, call 0: error 1e+03" in result.stderr
    assert "2 schedules of 1 x 2 ranks" in result.stdout
    assert "slow:1 failed" in result.stdout
    (line,) = [line for line in result.stderr.splitlines() if "This runs it alone: " in line]
    assert line.startswith("mkernel: schedule slow:1 failed")
    command = shlex.split(line.partition("alone: ")[2])
    assert command[:3] == ["mkernel", "check", "all_gather_matmul"]
    assert command[-2:] == ["--schedule", "slow:1"]
    again = run(*command[1:])
    assert again.exit_code == 1
    assert "all_gather_matmul, rank 1, call 0: error 1e+03" in again.stderr
    assert "0 schedules" in again.stdout


def shown_as(case):
    """all_gather_matmul with another case."""
    return dataclasses.replace(operators.find("all_gather_matmul"), demo=Demo(case, len, len))


def test_other_bits_are_a_failure_too():
    def case(group, shape, seed, large):
        schedule = group.world.options.schedule
        y = torch.ones(4) + (2**-20 if schedule == "slow:0" else 0)
        exact = torch.ones(4, dtype=torch.float64), 1e-3
        return Case("nothing", lambda: y, lambda: exact, lambda: None)

    on_rank = checking.calls_of(shown_as(case), (32, 16, 16), 1)
    with pytest.raises(checking.WrongResult, match="call 0: the result is right, but has other bits"):
        list(Exploration(on_rank, schedules=3))


def test_calls_have_different_inputs():
    seeds = []
    real = operators.find("all_gather_matmul").load("demo").case

    def noted(group, shape, seed, large):
        seeds.append((group.rank, seed))
        return real(group, shape, seed, large)

    on_rank = checking.calls_of(shown_as(noted), (32, 16, 16), 3)
    list(Exploration(on_rank, schedules=1))
    assert sorted(seeds) == [(rank, seed) for rank in range(2) for seed in range(3)]


# -- functions of a user

MINE = """
import neighbour
import torch
import mkernel as mk

def on_rank(group):
    y = mk.all_gather_matmul(torch.ones(16, 16), torch.ones(16, neighbour.COLUMNS))
    assert (y == 16).all()

def broken(group):
    on_rank(group)
    if group.world.options.schedule == "slow:1":
        raise ValueError("[red]what a rank says[/red]")

def hangs(group):
    if group.rank == 0:
        group.barrier()
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour.py").write_text("COLUMNS = 8\n")
    path = tmp_path / "with space.py"
    path.write_text(MINE)
    return path


def test_a_function_of_a_file(mine):
    result = run("check", f"{mine}:on_rank", "--nodes", "1", "--schedules", "5")
    assert result.exit_code == 0
    assert "5 schedules of 1 x 2 ranks" in result.stdout


def test_a_failure_of_a_function_has_its_traceback_and_its_command(mine):
    result = run("check", f"{mine}:broken", "--nodes", "1")
    assert result.exit_code == 1
    assert "ValueError: [red]what a rank says[/red]" in result.stderr
    assert f'File "{mine}", line 13, in broken' in result.stderr
    assert "explore.py" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "This runs it alone: " in line]
    again = run(*shlex.split(line.partition("alone: ")[2])[1:])
    assert again.exit_code == 1
    assert "ValueError: [red]what a rank says[/red]" in again.stderr


def test_an_error_of_the_package_is_told_without_a_traceback(mine):
    result = run("check", f"{mine}:hangs", "--nodes", "1")
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    assert "waited" in result.stderr
    assert "--schedule in-order" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_operator"], "there is no operator 'no_operator'; there are: all_gather_matmul,"),
        (["no/such/file.py:on_rank"], "there is no file no/such/file.py"),
        (["mine.py"], "name a function of the file: mine.py:on_rank"),
        (["mine.py:"], "name a function of the file: mine.py:on_rank"),
        (["mine.py:on_rank", "--shape", "8x8x8"], "is for operators"),
        (["mine.py:on_rank", "--calls", "2"], "is for operators"),
        (["all_gather_matmul", "--shape", "33x8x8"], "must be divisible by the number of ranks (4)"),
        (["all_gather_matmul", "--schedule", "17"], "there is no schedule '17'; a schedule is one of in-order,"),
        (["all_gather_matmul", "--schedule", "slow:4"], "the ranks are 0 to 3"),
        (["all_gather_matmul", "--without", "fast"], "there is no schedule 'fast'"),
        (["all_gather_matmul", "--schedules", "0"], "nothing would run"),
        (["all_gather_matmul", "--schedules", "-1"], "--schedules"),
        (["all_gather_matmul", "--nodes", "100000"], "65534 ranks at most"),
    ],
)
def test_check_refuses(arguments, message):
    result = run("check", *arguments)
    assert result.exit_code == 2
    assert message in words(result)


def test_a_file_without_the_function_says_which_it_has(mine):
    result = run("check", f"{mine}:on_ranks")
    assert result.exit_code == 2
    assert "there is no function 'on_ranks' in" in words(result)
    assert "there are: on_rank, broken, hangs" in words(result)


# -- how far it is


def test_lines_say_how_far_it_is(monkeypatch):
    monkeypatch.setattr(estimates, "FIRST_LINE", 0.0)
    result = run("check", "all_gather_matmul", *SMALL, "--schedules", "4")
    assert "mkernel: 1 of 4 schedules passed in" in result.stderr
    assert "to go" in result.stderr
    assert "to go" not in result.stdout


def test_ctrl_c_prints_what_was_covered(tmp_path):
    """The function sends the signal itself, in the third schedule: nothing depends on time."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import os, signal\n"
        "ran = []\n"
        "def on_rank(group):\n"
        "    if group.rank == 0:\n"
        "        ran.append(1)\n"
        "        if len(ran) == 3:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "    group.barrier()\n"
    )
    command = [sys.executable, "-m", "mkernel.cli", "check", f"{path}:on_rank", "--schedules", "500"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert ended.returncode == checking.INTERRUPTED == 128 + signal.SIGINT
    assert "interrupted; what was checked so far:" in ended.stdout
    assert "2 schedules of 2 x 2 ranks" in ended.stdout
    assert "Traceback" not in ended.stderr


def test_a_ctrl_c_that_is_lost_ends_it_all_the_same(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import os, signal\n"
        "def on_rank(group):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        group.barrier()\n"
        "    except KeyboardInterrupt:\n"
        "        pass\n"
    )
    command = [
        sys.executable, "-m", "mkernel.cli", "check", f"{path}:on_rank", "--nodes", "1", "--gpus-per-node", "1",
        "--schedules", "500",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert ended.returncode == checking.INTERRUPTED
    # Ctrl-C is raised where the scheduler runs, not in the code of a rank, which may just end before
    assert re.search(r"\b[01] schedules of 1 x 1 ranks", ended.stdout)


# -- mkernel.testing


@pytest.mark.thorough
def test_the_helper_needs_no_pytest_and_no_command_line():
    program = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('pytest', '_pytest', 'typer', 'rich'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from mkernel.testing import check\n"
        "report = check(lambda group, word: group.barrier(), 'word', nodes=2, gpus_per_node=2, schedules=7)\n"
        "assert len(report.ran) == 7\n"
        "print(report)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "7 schedules of 2 x 2 ranks" in ended.stdout


def test_the_helper_gives_arguments_on_and_returns_the_report():
    from mkernel.sim.scheduler import Options
    from mkernel.testing import check

    seen = []
    sim = Options(ctas=3)
    report = check(lambda group, a, b: seen.append((a, b, group.world.options.ctas)), 1, "two", schedules=2, sim=sim)
    assert isinstance(report, Report)
    assert seen == [(1, "two", 3)] * 4
