"""Where this package keeps files of its own: what was compiled, what was tuned."""

from __future__ import annotations

import os
from pathlib import Path

from mkernel.runtime.errors import MKernelError


def folder() -> Path:
    """mkernel/ in $XDG_CACHE_HOME, if that is an absolute path, else in ~/.cache. It may not be there yet."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # an empty or a relative path means nothing there
        return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "mkernel"
    except RuntimeError as problem:
        raise MKernelError(
            "this user has no home folder: set XDG_CACHE_HOME to a directory that can be written"
        ) from problem
