"""Another user of the machine, for tests of what others may do to this one's files. Only root can play several."""

import contextlib
import multiprocessing
import os
import shutil
import tempfile
import traceback
from pathlib import Path

import pytest

from support.patience import HANG

SOMEBODY = 54321  # a user id that nobody here has
VICTIM = 54322  # another one
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files that belong to another user")


def give_away(*paths):
    """Make files, or links, another user's."""
    for path in paths:
        os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)


def _work(user, function, answers):
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    try:
        answers.put((True, function()))
    except BaseException:
        answers.put((False, traceback.format_exc()))


def run_as(user, function):
    """What the function returns when another user calls it, in a process of its own."""
    processes = multiprocessing.get_context("fork")
    answers = processes.Queue()
    process = processes.Process(target=_work, args=(user, function, answers))
    process.start()
    fine, answer = answers.get(timeout=HANG)
    process.join(HANG)
    assert fine, answer
    return answer


@contextlib.contextmanager
def open_folder():
    """A folder that every user can reach; tmp_path is this user's alone."""
    made = Path(tempfile.mkdtemp(prefix="mkernel-test-", dir="/tmp"))
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made)
