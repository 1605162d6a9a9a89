"""The documentation: its Python runs, its links lead somewhere."""

import ast
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support import forked_processes

import mkernel as mk
from mkernel import cli, operators

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_of(page):
    """The page's Python blocks as one program, each line where it is in the page."""
    program, inside = [], False
    for line in page.read_text().splitlines():
        fence = line.startswith("```")
        program.append(line if inside and not fence else "")
        if fence:
            inside = not inside and line.strip() == "```python"
    return "\n".join(program) + "\n"


def title(page):
    return str(page.relative_to(ROOT))


SLOW = ("new-operator", "tensor-parallel", "gradients-and-graphs", "training-loop", "testing", "frameworks")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.thorough if page.stem in SLOW else (), id=title(page))
        for page in PAGES
        if python_of(page).strip()
    ],
)
def test_python_runs(page, tmp_path):
    # a file, since Triton reads the source of kernels; with the page's line numbers
    path = tmp_path / f"{page.stem}.py"
    path.write_text(python_of(page))
    started = re.search(r"<!-- tested with: torchrun --nproc-per-node (\d+) -->", page.read_text())
    if started:
        for output, code in forked_processes.run_ranks(path, int(started.group(1)), store="apart"):
            assert code == 0, output
    else:
        forked_processes.run_python([str(path)], folder=str(tmp_path))


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links(page):
    for text, target in re.findall(r"\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{title(page)}: [{text}] leads to {target}, which is not there"
        if heading:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in headings}
            assert heading in anchors, f"{title(page)}: there is no heading #{heading} in {path or page.name}"


def test_python_is_marked_as_such():
    """`python` is what is run: no other name for it."""
    for page in PAGES:
        kinds = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)[::2]
        assert not [kind for kind in kinds if kind.lower().startswith("py") and kind != "python"], title(page)


def test_every_operator_and_command_is_in_the_documentation():
    home, reference = (ROOT / "docs/index.md").read_text(), (ROOT / "docs/reference/python.md").read_text()
    for name in operators.registered():
        assert f"`mk.{name}`" in home, name
        assert f"::: mkernel.{name}" in reference, name
    commands = (ROOT / "docs/reference/command-line.md").read_text()
    for command in cli.main.registered_commands:
        assert f"## {command.name or command.callback.__name__}\n" in commands
    shown = set(re.findall(r"^::: (\S+)$", reference, re.MULTILINE))
    assert {f"mkernel.{name}" for name in mk.__all__ if name != "__version__"} <= shown
    assert {f"mkernel.nn.{name}" for name in mk.nn.__all__} <= shown


def test_every_structure_and_function_of_kernels_is_in_the_reference():
    """The public names of mkernel.lang: each has a description of its own and, if it is a function, a row that says who
    calls it."""
    page = (ROOT / "docs/reference/lang.md").read_text()
    shown = set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    rows = set(re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE))
    for path in sorted((ROOT / "src/mkernel/lang").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert f"mkernel.lang.{path.stem}.{node.name}" in shown, f"{path.name}: {node.name}"
                assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"
                assert isinstance(node, ast.ClassDef) or node.name in rows, f"{path.name}: who calls {node.name}?"


def test_environment_variables_are_listed():
    """Every variable that the package reads or sets is in the table of docs/getting-started.md."""
    listed = set(re.findall(r"^\| `(\w+)` \| ", (ROOT / "docs/getting-started.md").read_text(), re.MULTILINE))
    used = set()
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        constants = {  # VARIABLE = "NAME"
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                name = node.slice
            elif isinstance(node, ast.Call) and re.fullmatch(r"os\.(environ\.\w+|getenv)", ast.unparse(node.func)):
                name = node.args[0]
            else:
                continue
            used.add(name.value if isinstance(name, ast.Constant) else constants[name.id])
    assert len(used) > 5
    assert used <= listed, used - listed


def test_the_glossary_is_linked():
    for page in ("README.md", "docs/index.md", "docs/concepts.md"):
        assert "glossary.md)" in (ROOT / page).read_text(), page


def test_tables_of_figures_say_how_and_when():
    """Each section of the performance page with a table of times has its commands and its date."""
    sections = re.split(r"^## ", (ROOT / "docs/performance.md").read_text(), flags=re.MULTILINE)[1:]
    timed = [section for section in sections if re.search(r"^\|.*\d\.\d.*\|$", section, re.MULTILINE)]
    assert len(timed) > 5
    for section in timed:
        assert re.search(r"2026-\d\d-\d\d", section), section.partition("\n")[0]
        assert re.search(r"^    (mkernel|python|torchrun|pytest) |`mkernel ", section, re.MULTILINE), section.partition(
            "\n"
        )[0]


def test_pictures_are_pictures():
    for picture in (ROOT / "docs/pictures").glob("*.svg"):
        root = ElementTree.parse(picture).getroot()
        assert root.get("aria-label"), picture
        used = [page for page in PAGES if picture.name in page.read_text()]
        assert used, f"{picture} is shown nowhere"
