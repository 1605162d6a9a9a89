"""What the package's build does beside what pyproject.toml says: it compiles the native network library.

The library has a C interface, so one serves every Python version: wheels are for a platform, not for a Python. Where it
can not be compiled, a wheel is made without it, and it is compiled on first use, as in a source tree.
"""

import importlib
import sys
import types
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCE = Path(__file__).parent / "src"


def builder():
    """mkernel.net.build, without what the packages above it import: torch need not be here."""
    for name in ("mkernel", "mkernel.runtime", "mkernel.net"):
        package = types.ModuleType(name)
        package.__path__ = [str(SOURCE.joinpath(*name.split(".")))]
        sys.modules[name] = package
    return importlib.import_module("mkernel.net.build")


class BuildPy(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return
        build = builder()
        try:
            build.compile_for_package(Path(self.build_lib) / "mkernel" / "net" / "native")
        except build.TransportError as problem:
            self.warn(f"without the native network library, which will be compiled on first use: {problem}")


class Wheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class ForPlatform(Distribution):
    def has_ext_modules(self):
        return True


setup(distclass=ForPlatform, cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel})
