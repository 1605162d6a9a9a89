"""What a reader can rely on: short argument lists, short functions and files, and layers that know only those below."""

from __future__ import annotations

import ast
import functools
import sys
from functools import cache
from pathlib import Path

import pytest

import mkernel

SOURCE = Path(mkernel.__file__).parent
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
PARAMETERS, OF_KERNELS, POSITIONAL = 10, 12, 8
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 600, 80
METHODS = 12  # of a class of a backend, without those of Python (__init__)
BACKENDS = {
    "exchange": {"SimExchange", "SoloExchange", "ThreadExchange", "StoreExchange"},
    "memory": {"SimMemory", "DeviceMemory", "SymmetricMemory", "SharedMemory"},
    "launcher": {"SimLauncher", "InlineLauncher", "CudaLauncher"},
    "network": {"SimNetwork", "NativeNetwork"},
}
WORLDS = {"SimWorld", "SoloWorld", "CudaThreads", "CudaProcesses", "CpuProcesses"}


@cache
def tree(file):
    return ast.parse((SOURCE / file).read_text())


def _is_jit(decorator):
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    return isinstance(decorator, ast.Attribute) and decorator.attr == "jit"


def device_functions(file):
    return [node for node in ast.walk(tree(file))
            if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list))]  # fmt: skip


def parameters(function):
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)


@functools.cache
def names_of_device_functions():
    return {function.name for file in FILES for function in device_functions(file)}


@pytest.mark.parametrize("file", [file for file in FILES if device_functions(file)])
def test_device_functions_have_short_argument_lists(file):
    names, found = names_of_device_functions(), []
    for function in device_functions(file):
        # a device function may be passed to another one, too: only its name tells a kernel
        most = OF_KERNELS if function.name.endswith("_kernel") else PARAMETERS
        if parameters(function) > most:
            found.append(f"{function.name} has {parameters(function)} parameters, {most} are allowed")
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
                continue
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            # those in capitals are device functions that this one was given
            if (called in names or called.isupper()) and len(node.args) > POSITIONAL:
                found.append(f"line {node.lineno}: {called} gets {len(node.args)} positional arguments")
    assert not found


@pytest.mark.parametrize("file", FILES)
def test_files_and_functions_are_short(file):
    found = []
    lines = (SOURCE / file).read_text().count("\n")
    if lines > LINES_OF_A_FILE:
        found.append(f"{lines} lines")
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            length = body[-1].end_lineno - body[0].lineno + 1
            if length > LINES_OF_A_FUNCTION:
                found.append(f"{node.name} has {length} lines")
    assert not found


# folder -> what it may import of mkernel; a module that is named here alone may be imported where its folder may not
LEAVES = {"cache", "operators", "version"}  # modules that know nothing but errors
# modules of an operator's package that only the tools import, by the name that its entry in the registry has for them;
# a model imports its peer
TOOLS = ("baselines", "bench", "demo", "model", "peer", "tuning", "workload")
BELOW = {
    "integrations": {"integrations", "nn", "ops", "runtime"},
    "lang": {"lang"},
    "net": {"net", "runtime.errors", *LEAVES},
    "nn": {"nn", "ops", "runtime"},
    "runtime": {"lang", "runtime", "net", "sim", *LEAVES},
    "sim": {"lang", "runtime", "sim", *LEAVES},
}


def imported(file):
    """Modules of mkernel that a file imports when it is imported itself or used, but not those for types only."""
    skipped = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped |= set(ast.walk(node))
    for node in ast.walk(tree(file)):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [alias.name for alias in node.names] if node.module.count(".") == 1 or node.module == "mkernel" else []
            )
            yield from ((node.lineno, f"{node.module}.{name}") for name in names or [""])


def of_mkernel(file):
    """(line, module) of what a file imports of mkernel."""
    for line, module in imported(file):
        if module.startswith("mkernel."):
            yield line, module.removeprefix("mkernel.").rstrip(".")


def test_the_registry_knows_nothing_but_errors():
    """So whoever is above errors may ask it; and it is not worth importing anything for."""
    assert {module for _, module in of_mkernel("operators.py")} == {"runtime.errors"}
    outside = {module.split(".")[0] for _, module in imported("operators.py")} - {"mkernel"}
    assert outside <= set(sys.stdlib_module_names) | {"__future__"}


def test_operators_know_no_tool():
    """What the tools need of an operator is in modules of its package that nothing else of it imports."""
    below = {"lang", "ops", "runtime", *LEAVES}
    found = []
    for file in FILES:
        path = Path(file)
        if path.parts[0] != "ops" or path.stem in TOOLS:
            continue
        for line, name in of_mkernel(file):
            of_tools = name.split(".")[0] == "ops" and set(name.split(".")) & set(TOOLS)
            if name.split(".")[0] not in below or of_tools:
                found.append(f"{file}:{line} imports mkernel.{name}")
    assert not found


def test_no_tool_imports_an_operator():
    """Tools find operators in the registry. The public API has their functions; modules and integrations call them."""
    found = [
        f"{file}:{line} imports mkernel.{name}"
        for file in FILES
        if not file.startswith(("ops/", "nn/", "integrations/")) and file not in ("__init__.py", "api.py")
        for line, name in of_mkernel(file)
        if name.split(".")[0] == "ops"
    ]
    assert not found


@pytest.mark.parametrize("folder", ["nn", "integrations"])
def test_nothing_imports_what_is_above_all_else(folder):
    """Who wants modules or integrations imports them, or asks the package for them. Integrations may use modules."""
    found = [
        f"{file}:{line} imports mkernel.{name}"
        for file in FILES
        if not file.startswith((f"{folder}/", "integrations/"))
        for line, name in of_mkernel(file)
        if name.split(".")[0] == folder
    ]
    assert not found


@pytest.mark.parametrize("folder", BELOW)
def test_layers_know_only_those_below(folder):
    found = []
    for file in FILES:
        if not file.startswith(f"{folder}/") or file == "nn/bench.py":  # a tool: it uses the other benchmarks
            continue
        for line, name in of_mkernel(file):
            if not any(name == allowed or name.startswith(f"{allowed}.") for allowed in BELOW[folder]):
                found.append(f"{file}:{line} imports mkernel.{name}")
    assert not found


def classes():
    """Every class in files that belong to a backend, by name."""
    names = {"World", *WORLDS, *(name for each in BACKENDS.values() for name in each)}
    found = {}
    for file in FILES:
        here = [node for node in tree(file).body if isinstance(node, ast.ClassDef)]
        if names & {node.name for node in here}:
            found.update({node.name: node for node in here})
    assert names <= found.keys()
    return found


def methods(node):
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("__")}


def test_classes_of_backends_are_small():
    sizes = {name: len(methods(node)) for name, node in classes().items()}
    assert not {name: size for name, size in sizes.items() if size > METHODS}


def test_backends_are_composed():
    """A world has its parts as attributes; neither worlds nor parts inherit from each other."""
    found = classes()
    for name in (*WORLDS, *(name for each in BACKENDS.values() for name in each)):
        assert not found[name].bases, f"{name} inherits"
    for name in WORLDS:
        assigned = {
            node.attr for node in ast.walk(found[name])
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }  # fmt: skip
        assert BACKENDS.keys() <= assigned, f"{name} lacks {BACKENDS.keys() - assigned}"


@pytest.mark.parametrize("part", BACKENDS)
def test_parts_of_backends_offer_what_their_interface_asks_for(part):
    """mypy compares the signatures; this also covers files that only run on GPUs."""
    found = classes()
    asked = methods(found[part.capitalize()])
    for name in BACKENDS[part]:
        assigned = {
            node.attr for node in ast.walk(found[name])
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }  # fmt: skip
        assert asked <= methods(found[name]) | assigned, f"{name} lacks {asked - methods(found[name]) - assigned}"


@pytest.mark.parametrize("folder", ["lang", "runtime", "net", "sim"])
def test_no_layer_below_knows_an_operator(folder):
    """Not even for types."""
    found = [
        f"{file}:{node.lineno}"
        for file in FILES if file.startswith(f"{folder}/")
        for node in ast.walk(tree(file))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mkernel.ops"))
        or (isinstance(node, ast.Import) and any(alias.name.startswith("mkernel.ops") for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "mkernel" and "ops" in [a.name for a in node.names])
    ]  # fmt: skip
    assert not found


@pytest.mark.parametrize(
    "name", ["describable", "check_tensor", "check_plain", "check_out", "overlap", "overlaps_itself"]
)
def test_what_operators_check_alike_is_checked_in_one_place(name):
    found = [
        f"{file}:{node.lineno}"
        for file in FILES if file.startswith(("ops/", "runtime/"))
        for node in ast.walk(tree(file)) if isinstance(node, ast.FunctionDef) and node.name.strip("_") == name
    ]  # fmt: skip
    assert len(found) == 1, found
    assert found[0].startswith("runtime/")


NAMES = ("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "ones", "rand", "randn", "tensor", "zeros")
FACTORIES = {f"torch.{name}" for name in NAMES}


@pytest.mark.parametrize("file", [file for file in FILES if not file.startswith("integrations/")])
def test_tensors_are_made_on_a_device_that_is_named(file):
    """Elsewhere, they would be where the caller's `torch.device(...)` or torch.set_default_device says: host memory on
    a GPU, or on the meta device."""
    found = []
    for node in ast.walk(tree(file)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in FACTORIES:
            continue
        if not {"device", None} & {keyword.arg for keyword in node.keywords}:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    assert not found
