"""Lets tests in every folder import `helpers` and `mutation`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
