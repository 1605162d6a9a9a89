"""The distribution is called mkernel-gpu: mkernel is somebody else's."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAMEWORKS = ("huggingface", "torchtitan")  # extras of mkernel.integrations
# what pip would take for the other package: mkernel with extras, or as what is to be installed
WRONG = re.compile(r"mkernel\[[a-z]|(?:pip|uv) [^\n`]*\binstall\b[^\n`]*(?<![\w./-])mkernel(?![\w./-])")


def test_what_is_wrong_is_found():
    for text in ("pip install mkernel", "pip install -U 'mkernel[sim]'", "uv pip install mkernel==0.1", "mkernel[all]"):
        assert WRONG.search(text), text
    for text in ("pip install 'mkernel-gpu[sim]'", "pip install -e '.[all]'", "pip install ./mkernel", "mkernel demo"):
        assert not WRONG.search(text), text


def test_nothing_advises_to_install_another_package():
    folders = [ROOT / name for name in ("src", "docs", "examples", ".ci") if (ROOT / name).is_dir()]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".html", "")]
    files += [ROOT / name for name in ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml")]
    files = [path for path in files if path.is_file() and "egg-info" not in str(path)]
    assert len(files) > 100
    for path in files:
        found = WRONG.search(path.read_text())
        assert not found, f"{path}: {found.group()}"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no tomllib")
def test_the_name():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "mkernel-gpu"
    assert list(project["scripts"]) == ["mkernel"]
    extras = project["optional-dependencies"]
    own = [name for name in extras if name not in ("all", *FRAMEWORKS)]
    assert extras["all"] == [f"mkernel-gpu[{','.join(own)}]"]
