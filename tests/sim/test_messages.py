"""The page that shows what a mistake looks like: every message in it is the one that comes out."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import mkernel as mk
from mkernel.runtime.world import Launch
from mkernel.sim.scheduler import Options

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
HEADING = "## What a mistake looks like\n"
OPENING = "; ".join(  # in one line, so that lines are easy to count
    ["import triton", "import triton.language as tl"]
    + [f"from mkernel.lang.{name} import *" for name in ("context", "device", "roles", "signals")]
)


def section():
    return PAGE.read_text().split(HEADING)[1].split("\n## ")[0]


def kernel_of_page():
    source = re.search(r"```python\n(.*?)```", section(), re.DOTALL).group(1)
    return source[source.index("@triton.jit") :]


def mistakes():
    """Title -> what is changed in the kernel, and the message."""
    found = re.findall(r"\*\*(.*?)\*\*.*?\n```diff\n(.*?)```\n\n```\n(.*?)```", section(), re.DOTALL)
    return {title: (change, message) for title, change, message in found}


def changed(source, change):
    """Lines with - are taken away, those with + put in their place; a line with neither says where."""
    old = [line[1:] for line in change.splitlines() if line[0] in "- "]
    new = [line[1:] for line in change.splitlines() if line[0] in "+ "]
    old, new = ("".join(line + "\n" for line in lines) for lines in (old, new))
    assert source.count(old) == 1, old
    return source.replace(old, new)


def message_of(source, folder, calls):
    path = folder / "push.py"
    path.write_text(f"{OPENING}\n{source}")
    specification = importlib.util.spec_from_file_location(f"push_{abs(hash(source))}", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)

    def on_rank(group):
        workspace = group.workspace("push", 4, 64)
        start, here = workspace.data_start // 4, ["y"] if group.rank == 1 else []
        for _ in range(calls):
            arguments = dict(context=workspace.context, x=torch.ones(8), y=torch.zeros(8), start=start, SIZE=group.size)
            group.launch(Launch(op="push", group=group, kernel=module.push, grid=1, arguments=arguments,
                                inputs=["x"], results=here))  # fmt: skip

    with pytest.raises(mk.SimulatorError) as caught:
        mk.spawn(on_rank, nodes=1, gpus_per_node=2, device="cpu", sim=Options(schedule="in-order"))
    message = re.sub(r"[^\s(]*/push\.py:(\d+)", lambda match: f"push.py:{int(match.group(1)) - 1}", str(caught.value))
    return re.sub(r"(lang/\w+\.py):\d+", r"\1", message) + "\n"


def calls_of(title):
    return 2 if title == "Early reuse" else 1


def test_the_page_has_them_all():
    titles = [
        *("Missing wait", "Signal before data", "Missing barrier", "Relaxed signal", "Wrong epoch", "Early reuse"),
        *("Missing fence", "Store out of bounds", "Store to an input", "Never written"),
        *("Load of unwritten memory", "Missing finish"),
    ]
    assert list(mistakes()) == titles


@pytest.mark.parametrize("title", mistakes())
def test_the_message_is_the_one_in_the_page(title, tmp_path):
    change, message = mistakes()[title]
    assert message_of(changed(kernel_of_page(), change), tmp_path, calls_of(title)) == message


def test_the_kernel_of_the_page_is_right(tmp_path):
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        message_of(kernel_of_page(), tmp_path, 1)
