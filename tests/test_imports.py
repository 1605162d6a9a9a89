"""What is imported when: the package and the command line answer without torch where they can."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import HANG

import mkernel as mk

SOURCE = Path(mk.__file__).parents[1]
BLOCKED = "import sys; sys.modules.update(dict.fromkeys(('torch', 'triton', 'numpy')));"  # to import them is an error


def python(code, *arguments):
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "COLUMNS": "200", "TERM": "dumb"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=environment)


def mkernel(*arguments):
    """The command line where there is no torch."""
    return python(f"{BLOCKED} from mkernel.cli import main; main(prog_name='mkernel')", *arguments)


def test_the_package_imports_nothing_large():
    done = python("import sys, mkernel; print({'torch', 'triton', 'numpy', 'mkernel.api'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


def test_errors_and_configurations_need_no_torch():
    done = python(f"{BLOCKED} import mkernel as mk; print(mk.Config(warps=4).warps, mk.ArgumentError.__name__)")
    assert done.stdout.strip() == "4 ArgumentError", done.stderr


def test_names_are_those_that_type_checkers_see():
    tree = ast.parse(Path(mk.__file__).read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: f"{node.module}" for node in checked.body for alias in node.names}
    assert seen == {name: f"mkernel.{module}" for name, module in mk._MODULES.items()}
    assert set(mk.__all__) == {*seen, "__version__"}
    assert set(mk.__all__) <= set(dir(mk))


@pytest.mark.thorough
def test_every_name_is_there():
    done = python("from mkernel import *; import mkernel; print([name for name in mkernel.__all__ if not eval(name)])")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.thorough
def test_submodules_are_there_without_an_import():
    done = python("import mkernel as mk; print(mk.net.Tcp.__name__, mk.runtime.group.Group is mk.Group)")
    assert done.stdout.strip() == "Tcp True", done.stderr


def test_what_is_not_there():
    with pytest.raises(AttributeError, match="module 'mkernel' has no attribute 'all_gather'"):
        _ = mk.all_gather


COMMANDS = ["demo", "bench", "doctor", "why", "trace", "check", "tune"]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)])
def test_help_needs_no_torch(arguments):
    done = mkernel(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--no-such-option"], "--no-such-option"),
        (["no-such-command"], "no-such-command"),
        (["demo", "--nodes", "0"], "--nodes"),
        (["demo", "--html", "/no/such/folder/page.html"], "/no/such/folder"),
        (["bench", "--ranks", "none"], "--ranks"),
        (["bench", "--link", "-1"], "--link"),
        (["bench", "--against", "nobody"], "nobody"),
        (["bench", "no_such_operator"], "no_such_operator"),
        (["bench", "--shape", "1x1x1"], "--shape"),
        (["trace", "no_such_operator"], "no_such_operator"),
        (["trace", "moe_ffn", "--out", "page.html"], "page.html"),
        (["check", "no_such_operator"], "no_such_operator"),
        (["tune", "no_such_operator"], "no_such_operator"),
        (["tune"], "OP"),
        (["why"], "files"),
    ],
)
def test_mistakes_are_named_without_torch(arguments, named):
    done = mkernel(*arguments)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
