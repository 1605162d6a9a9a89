"""Lets tests in every folder import `helpers` and `mutation`, and keeps the machine's tuned configurations out."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# what somebody has tuned here is no business of the tests
os.environ["MKERNEL_TUNED_FILE"] = str(Path(__file__).parent / "no-such-file.json")
