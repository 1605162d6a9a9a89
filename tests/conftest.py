"""Lets tests in every folder import `support`, keeps the machine's tuned configurations out, and torch to one thread;
decides which cases of tests are left to `make test-all`."""

import gc
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
# what somebody has tuned here is no business of the tests
os.environ["OMP_NUM_THREADS"] = "1"  # other tests run on the other cores
os.environ["MKERNEL_TUNED_FILE"] = str(Path(__file__).parent / "no-such-file.json")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell that starts a job in the background lets it ignore Ctrl-C, and the processes that tests start would, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

# how fast the machine is, beside all else that runs on it, is no property of what is tested
settings.register_profile("mkernel", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mkernel")


def pytest_collection_finish():
    """What all test files have imported lives as long as the tests: no collection looks at it again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # extension modules complain about objects that are never freed


def pytest_runtest_teardown():
    """A test that calls mk.init leaves its group to nobody."""
    groups = sys.modules.get("mkernel.runtime.group")
    if groups is not None:
        groups.set_current(None)


CLUSTERS = ((1, 1), (1, 2), (2, 2))


def is_usual(item):
    """Whether `make test` runs this case of a test: with few clusters, seeds, dtypes and recipes of fp8."""
    given = item.callspec.params
    cluster, seed, dtype, recipe = (given.get(name) for name in ("cluster", "seed", "dtype", "recipe"))
    usual = (cluster is None or cluster in CLUSTERS) and not seed
    usual &= dtype is None or str(dtype) == "torch.bfloat16"
    return usual and (recipe is None or "Block" in str(recipe))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """The other cases are thorough, but not all cases of a test, and no variant that must be found broken."""
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.path.stem.endswith("_broken"):
            tests[item.path, item.originalname].append(item)
    for cases in tests.values():
        quick = [case for case in cases if not case.get_closest_marker("thorough")]
        usual = [case for case in quick if is_usual(case)] or quick[:1]
        for case in quick:
            if case not in usual:
                case.add_marker("thorough")
