"""Copies of mkernel's kernels, beside the package itself: with other device functions, or with another syntax tree.

For what is compiled. In the simulator `Options.replace` does the same for one run, with no copy.
"""

import ast
import contextlib
import importlib
import itertools
import sys
from pathlib import Path

import triton

import mkernel

COPIED = ("lang", "ops")
_numbers = itertools.count()


def _name_inside(module, name):
    """The name of a module of mkernel in the copy; None if it is not copied."""
    parts = (module or "").split(".")
    return ".".join([name, *parts[1:]]) if parts[0] == "mkernel" and parts[1:2] and parts[1] in COPIED else None


def _rename_namespace(node, name):
    """Let a copy register its operators with torch.library, and call them, in a namespace of its own."""
    if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops.mkernel":
        node.attr = name
    elif isinstance(node, ast.Assign) and ast.unparse(node) == "NAMESPACE = 'mkernel'":
        node.value = ast.Constant(name)


def copy_package(folder, change=None):
    """Copy lang/ and ops/ into `folder`, as a package of another name, which is returned: `module_of` imports from it.
    change: is called with the syntax tree of each file."""
    source = Path(mkernel.__file__).parent
    name = f"mkernel_copy_{next(_numbers)}"
    files = [path for part in COPIED for path in (source / part).rglob("*.py")]
    for path in files:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            _rename_namespace(node, name)
            if isinstance(node, ast.ImportFrom):
                node.module = _name_inside(node.module, name) or node.module
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    assert _name_inside(alias.name, name) is None, f"{path}: import {alias.name}"
        if change is not None:
            change(tree)
        target = Path(folder) / name / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    (Path(folder) / name / "__init__.py").touch()
    return name


def module_of(folder, name, module):
    """A module of a copy, such as "ops.all_gather_matmul"."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{name}.{module}")
    finally:
        sys.path.remove(str(folder))


@contextlib.contextmanager
def copied(folder, module, replace):
    """A module of a copy, such as "ops.all_gather_matmul", where kernels call the values of `replace` in place of its
    keys, device functions of mkernel. Each must have been compiled into a kernel when the context ends."""
    name = copy_package(folder)
    found = module_of(folder, name, module)
    stand_ins = []  # a dictionary would ask for the hash of functions, of which they then know
    for old, new in replace.items():
        inside = module_of(folder, name, old.__module__.removeprefix("mkernel."))
        # a function of its own: it is compiled for this copy alone, and knows whether it was
        stand_ins.append((getattr(inside, old.__name__), triton.jit(new.fn)))
    for other in [other for key, other in sys.modules.items() if key.startswith(f"{name}.")]:
        for attribute, value in list(vars(other).items()):
            for old, new in stand_ins:
                if value is old:
                    setattr(other, attribute, new)
    yield found
    unused = [old.__name__ for old, new in stand_ins if new.hash is None]
    assert not unused, f"no kernel that was compiled calls {', '.join(unused)}"
