"""How long tests wait for what does not come. How fast the machine is, beside all else that runs on it, is no property
of what is tested: so this only ends what hangs, and is many times what a busy machine needs."""

import os

HANG = 600.0 * float(os.environ.get("MKERNEL_TEST_PATIENCE", "1"))  # seconds
# of ranks that wait for each other inside of a test: these say whom they wait for, so they come first
WAIT = HANG / 2
