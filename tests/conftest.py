"""Lets tests in every folder import `support`, keeps the machine's tuned configurations out, and torch to one
thread."""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
# what somebody has tuned here is no business of the tests
os.environ["OMP_NUM_THREADS"] = "1"  # other tests run on the other cores
os.environ["MKERNEL_TUNED_FILE"] = str(Path(__file__).parent / "no-such-file.json")

# how fast the machine is, beside all else that runs on it, is no property of what is tested
settings.register_profile("mkernel", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mkernel")


def pytest_runtest_teardown():
    """A test that calls mk.init leaves its group to nobody."""
    groups = sys.modules.get("mkernel.runtime.group")
    if groups is not None:
        groups.set_current(None)
