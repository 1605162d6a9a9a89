"""Deliberately broken copies: files are copied under another name, with texts replaced, and imported from there."""

import importlib.util
import inspect
import itertools
import sys
from pathlib import Path

import mkernel

OP = "op"  # among the names of files: the operator's own
_numbers = itertools.count()


def mutated(folder, op, *replacements):
    """Copy lang/ and the operator's modules, ops/<op>*.py, into a package in `folder`, applying (file, old, new)
    replacements; `file` is a name like "signals", or OP for ops/<op>.py. Returns the copied operator's module."""
    source = Path(mkernel.__file__).parent
    name = f"mutant_{next(_numbers)}"
    package = Path(folder) / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    files = {path.stem: path for path in (source / "lang").glob("*.py") if path.stem != "__init__"}
    files |= {path.stem: path for path in (source / "ops").glob(f"{op}*.py")}
    texts = {stem: path.read_text() for stem, path in files.items()}
    for file, old, new in replacements:
        stem = op if file == OP else file
        assert old in texts[stem], f"{stem}.py does not contain {old!r}"
        texts[stem] = texts[stem].replace(old, new)
    for stem, text in texts.items():
        for here in ("mkernel.lang.", f"mkernel.ops.{op}", "from mkernel.ops import "):
            text = text.replace(here, here.replace("mkernel.lang", name).replace("mkernel.ops", name))
        (package / f"{stem}.py").write_text(text)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{name}.{op}")
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
