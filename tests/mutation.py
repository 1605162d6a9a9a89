"""Deliberately broken copies: files are copied under another name, with texts replaced, and imported from there."""

import importlib.util
import inspect
import itertools
import sys
from pathlib import Path

import mkernel

# operators whose package has another name than they
PACKAGES = {
    "matmul_reduce_scatter": "reduce/reduce_scatter",
    "matmul_all_reduce": "reduce/all_reduce",
    "ring_attention": "attention",
    **dict.fromkeys(("moe_dispatch_matmul", "moe_combine", "moe_ffn"), "moe"),
}
OP = "op"  # among the names of files: the operator's own
_numbers = itertools.count()


def module_name(op):
    """Where an operator lies, below `mkernel`."""
    return f"ops.{PACKAGES.get(op, op).replace('/', '.')}"


def mutated(folder, op, *replacements):
    """Copy lang/ and the operator's modules, ops/<op>*.py or its package, into a package in `folder`, applying
    (file, old, new) replacements. `file` is a name like "signals", of lang/; OP for ops/<op>.py; or, like "op/kernel",
    a module of the operator's package; or, like "reduce/protocol", of ops/. Returns the copied operator's module."""
    package = PACKAGES.get(op, op)
    source = Path(mkernel.__file__).parent
    name = f"mutant_{next(_numbers)}"
    root = Path(folder) / name
    own = source / "ops" / package.partition("/")[0]
    paths = [*(source / "lang").glob("*.py"), *(source / "ops").glob(f"{op}*.py"), *own.rglob("*.py")]
    texts = {path.relative_to(source): path.read_text() for path in paths}
    for file, old, new in replacements:
        path = Path("lang", f"{file}.py")
        if file == OP or Path("ops", f"{file}.py") in texts:
            path = Path("ops", f"{op if file == OP else file}.py")
        elif file.startswith(f"{OP}/"):
            path = Path("ops", package, f"{file.removeprefix(f'{OP}/')}.py")
        assert old in texts[path], f"{path} does not contain {old!r}"
        texts[path] = texts[path].replace(old, new)
    for path in {Path("__init__.py"), Path("ops/__init__.py"), *texts}:
        text = texts.get(path, "").replace("mkernel.lang", f"{name}.lang").replace("mkernel.ops", f"{name}.ops")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{name}.{module_name(op)}")
    finally:
        sys.path.remove(str(folder))


def changed(folder, module, *replacements):
    """The module with (old, new) replacements in its source, each in one place; what it imports is as it is."""
    source = inspect.getsource(module)
    for old, new in replacements:
        assert source.count(old) == 1, f"{module.__name__} must contain {old!r} once"
        source = source.replace(old, new)
    path = Path(folder) / f"broken_{module.__name__.rsplit('.', 1)[-1]}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
