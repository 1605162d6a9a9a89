"""Tuned configurations: what `mkernel tune` has found to be fast, kept in a file and then used automatically.

The file is $MKERNEL_TUNED_FILE if that is set, else mkernel/tuned.json in $XDG_CACHE_HOME or ~/.cache. When a group is
made on GPUs, rank 0 reads it and broadcasts it, so that all ranks use the same entries. Existing groups do not see
later changes.

The key of an entry consists of the version of this package, the GPU, the shape of the group (nodes x ranks, CTAs of a
rank, paced links), the operator, the dtype and a bucket of sizes: the nearest power of two of each size, and whether it
is divisible by 128. Sizes that are the same on every rank (`agreed`) determine the fields that must be the same on
every rank (`shared`); together with the other sizes they determine the fields that each rank may choose. If all sizes
are the same on every rank, they determine the whole configuration.

Writers take a lock, read the file again, and replace it atomically: a reader sees either the old file or the new one,
and no writer loses another one's entries. A file that cannot be parsed is reported once and ignored; the next writer
moves it aside. A file that another user could change (see cache.py) is reported and ignored, too, and never written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mkernel import cache
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError, MKernelError
from mkernel.runtime.planning import check_given, common_ctas
from mkernel.runtime.printable import printable
from mkernel.version import __version__

if TYPE_CHECKING:
    from mkernel.runtime.group import Group

FORMAT = 1
VARIABLE = "MKERNEL_TUNED_FILE"
LOCK_SECONDS = 10.0  # how long a writer waits for another one

Entries = dict[str, dict[str, Any]]
Sizes = Mapping[str, int]  # a bool says whether a call has some property
_reported: set[str] = set()


# -- the file


def path() -> Path:
    """Where tuned configurations are kept."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    return cache.folder() / "tuned.json"


def read(file: Path) -> Entries:
    """The entries of a file; none if there is no file, or if it cannot be parsed."""
    if not os.path.lexists(file):
        return {}
    try:
        return _parse(_text_of(file))
    except FileNotFoundError:
        return {}
    except cache.UnsafePath as problem:
        _report(
            f"mkernel: the file of tuned configurations {file} is ignored, because other users could change it: "
            f"{problem}. Calls take the default configuration until then"
        )
        return {}
    except (OSError, ValueError, RecursionError) as problem:
        _report(
            f"mkernel: the file of tuned configurations {file} is ignored, because it cannot be read: {problem}. "
            f"`mkernel tune` writes a new one; calls take the default configuration until then"
        )
        return {}


def _text_of(file: Path) -> str:
    with open(cache.open_file(cache.resolve(file)), encoding="utf-8") as opened:
        return opened.read()


def _parse(text: str) -> Entries:
    data = json.loads(text)
    if not isinstance(data, dict) or not isinstance(data.get("entries"), dict):
        raise ValueError("it has no entries")
    if data.get("format") != FORMAT:
        raise ValueError(f"it has format {data.get('format')!r}, this version of mkernel writes {FORMAT}")
    for key, entry in data["entries"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict):
            raise ValueError(f"the entry {key!r} has no configuration")
    return data["entries"]


def _report(problem: str) -> None:
    problem = printable(problem)
    if problem not in _reported:
        _reported.add(problem)
        warnings.warn(problem, stacklevel=3)


def write(file: Path, entries: Entries) -> None:
    """Add entries to a file, replacing those with the same keys."""
    try:
        _write(cache.resolve(file.parent, make=True, on_the_way=True) / file.name, entries)
    except cache.UnsafePath as problem:
        raise MKernelError(
            f"tuned configurations cannot be kept in {file}, because other users could change it: {problem}, or set "
            f"{VARIABLE} to a file in a folder that only you can write to"
        ) from problem


def _write(file: Path, entries: Entries) -> None:
    """`write`, in a folder that has been checked."""
    with _locked(file.with_name(file.name + ".lock")):
        kept: Entries = {}
        with contextlib.suppress(FileNotFoundError):
            try:
                kept = _parse(_text_of(file))
            except (ValueError, RecursionError):
                os.replace(file, file.with_name(file.name + ".damaged"))
        text = json.dumps({"format": FORMAT, "entries": {**kept, **entries}}, indent=1, sort_keys=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name + ".")
        try:
            with os.fdopen(handle, "w") as new:
                new.write(text + "\n")
                new.flush()
                os.fsync(new.fileno())
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with open(cache.open_file(file, os.O_RDWR | os.O_CREAT)) as lock:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise MKernelError(
                        f"another process has held {file} for {LOCK_SECONDS:g} seconds; is an `mkernel tune` stuck?"
                    ) from None
                time.sleep(0.01)
        yield


# -- the entries of a group


@dataclass(frozen=True)
class Table:
    """The entries of one group: those of rank 0, on all ranks."""

    place: str
    entries: Entries
    chosen: dict[Any, Config | None] = field(default_factory=dict)  # the lookups of calls so far

    def find(self, op: str, dtype: torch.dtype, sizes: Sizes) -> dict[str, Any] | None:
        return self.entries.get(key_of(self.place, op, dtype, sizes))


def table_of(group: Group) -> Table:
    """The table of a new group. Collective on GPUs; elsewhere it is empty."""
    if group.device.type != "cuda":
        return Table("", {})
    mine = (place_of(group), _what_is_known()) if group.rank == 0 else None
    return Table(*group.exchange("tuned configurations", mine)[0])


def _what_is_known() -> Entries:
    try:
        file = path()
    except MKernelError:  # there is no folder for such a file
        return {}
    return read(file)


def place_of(group: Group) -> str:
    """Where a configuration was measured."""
    world = group.world
    paced = [
        f"{name} paced to {rate:g} GB/s"
        for name, rate in (("NVLink", world.links.nvlink), ("network", world.links.network))
        if rate is not None
    ]
    gpu = torch.cuda.get_device_name(group.device)
    ranks = f"{group.nodes} x {group.gpus_per_node} ranks of {common_ctas(group)} CTAs"
    return ", ".join([gpu, ranks, *paced])


def bucket(size: int) -> str:
    """Identifies the sizes that share a configuration."""
    if isinstance(size, bool):
        return "yes" if size else "no"
    nearest = 2 ** round(math.log2(size)) if size > 0 else 0
    return f"{nearest}" if size % 128 == 0 else f"{nearest} ragged"


def key_of(place: str, op: str, dtype: torch.dtype, sizes: Sizes) -> str:
    """The key of an entry."""
    shape = ", ".join(f"{name} {bucket(size)}" for name, size in sorted(sizes.items()))
    return " | ".join([f"mkernel {__version__}", place, op, str(dtype).removeprefix("torch."), shape])


# -- for operators


@dataclass(frozen=True)
class Tunable:
    """How the configurations of an operator are stored.

    agreed: sizes that are the same on every rank. own: those that may differ.
    shared: fields of a configuration that must be the same on every rank; without own sizes, all fields.
    """

    op: str
    agreed: tuple[str, ...]
    own: tuple[str, ...]
    shared: tuple[str, ...]

    def choose(self, group: Group, dtype: torch.dtype, given: Config | None, **sizes: int) -> Config | None:
        """The configuration of a call: the given one, a tuned one, or None."""
        table = group.tuned
        if given is not None or not table.entries:
            return given
        key = (self.op, dtype, tuple(sizes.items()))
        if key not in table.chosen:
            table.chosen[key] = self._find(table, dtype, sizes)
        return table.chosen[key]

    def _find(self, table: Table, dtype: torch.dtype, sizes: Sizes) -> Config | None:
        common = table.find(self.op, dtype, {name: sizes[name] for name in self.agreed})
        if common is None:
            return None
        if not self.own:
            return _config(common["config"])
        mine = table.find(self.op, dtype, sizes)
        fields = {name: value for name, value in common["config"].items() if name in self.shared}
        # it was tuned together with other values of the shared fields
        if mine is not None and mine.get("with") == common["config"]:
            fields |= {name: value for name, value in mine["config"].items() if name not in self.shared}
        elif not fields:
            return None  # only other own sizes were tuned, and the rest of that configuration was for them
        return _config(fields)

    def entries(
        self, place: str, dtype: torch.dtype, config: Config, measured: Mapping[str, Any], **sizes: int
    ) -> Entries:
        """The entries to write for a configuration that was found for these sizes."""
        fields = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
        if not self.own:
            return {key_of(place, self.op, dtype, sizes): {"config": fields, **measured}}
        common = {name: value for name, value in fields.items() if name in self.shared}
        mine = {name: value for name, value in fields.items() if name not in self.shared}
        agreed = {name: sizes[name] for name in self.agreed}
        return {
            key_of(place, self.op, dtype, agreed): {"config": common, **measured},
            key_of(place, self.op, dtype, sizes): {"config": mine, "with": common, **measured},
        }

    @staticmethod
    def origin(given: Config | None, chosen: Config | None) -> str:
        """Where the configuration of a call comes from, for the reasons of its plan."""
        if given is not None:
            return "configuration: as given; fields that are None have defaults"
        return "configuration: tuned" if chosen is not None else "configuration: default"


def _config(fields: Mapping[str, Any]) -> Config | None:
    """The configuration of an entry. If it is invalid, None, with one warning."""
    try:
        config = Config(**fields)
        check_given(config)
        return config
    except (TypeError, ArgumentError) as problem:
        _report(f"mkernel: an entry of {path()} is ignored: {problem}. `mkernel tune` writes a new one")
        return None
