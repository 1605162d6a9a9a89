import pytest
import torch
from harness import alone

from mkernel.bench.timing import Stopwatch


@pytest.fixture(autouse=True)
def measured_alone(monkeypatch):
    """Test runs side by side take turns to measure, if they share a lock file."""
    measure = Stopwatch._medians

    def in_turn(*args):
        with alone():
            return measure(*args)

    monkeypatch.setattr(Stopwatch, "_medians", in_turn)


STARTS_PROCESSES = {"torchrun", "run_ranks", "run_python", "in_process"}


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in str(item.fspath) and STARTS_PROCESSES & set(item.function.__code__.co_names):
            item.add_marker("processes")
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU")
        for item in items:
            if "tests/gpu" in str(item.fspath):
                item.add_marker(skip)
