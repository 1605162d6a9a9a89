"""The search: from the configuration that the cost model takes, one field at a time, as long as time is left.

A family is a configuration to begin with and, for some of its fields, other values. Its best is looked for
field by field: every value of a field is measured with the other fields as they are best so far, until a whole
round brings nothing. That finds the best of fields that do not depend on each other, and measures their sum
rather than their product. Families (another kernel, say) take turns in the order in which their beginnings
did; each may use its share of the time that is left.

Nearly all of the time goes into compiling (a second for a GEMM, ten for a mixture of experts; to measure takes a
tenth of a second), so what is measured next is compiled side by side before: all values of a field, which
are known when its turn comes. Nothing is compiled while something is measured, which would take longer then; and
nothing beyond the field, since its best value is a part of all that follows.

Measurements differ from time to time: the best one and the default are measured again at the end, by turns, and
the default stays if it is not slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mkernel.runtime.config import Config

NOISE = 0.005  # share by which a configuration must be faster to count as faster
DUELS = 2


@dataclass(frozen=True)
class Family:
    """Configurations that differ from `start` in the fields of `axes`."""

    start: Config
    axes: Mapping[str, Sequence[int]]


@dataclass
class Result:
    """What a search found. Times are milliseconds; None is a configuration that does not run."""

    default: float
    best: Config = field(default_factory=Config)
    best_time: float = 0.0
    trials: dict[Config, float | None] = field(default_factory=dict)
    complete: bool = True  # False: the time was over first

    @property
    def worst_time(self) -> float:
        return max(time for time in self.trials.values() if time is not None)


class Search:
    """One search. `measure` gives the time of a configuration, or None if it does not run; `tell` is called
    after every measurement. `compile` makes several configurations ready to be measured."""

    def __init__(
        self,
        measure: Callable[[Config], float | None],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[Result], None] = lambda result: None,
        compile: Callable[[Sequence[Config]], None] = lambda configs: None,
    ):
        self._measure = measure
        self._compile = compile
        self._clock = clock
        self._tell = tell
        self._end = clock() + seconds
        self.result = Result(default=float("inf"))

    def run(self, families: Sequence[Family]) -> Result:
        """Search all families. The default, an empty configuration, is measured first and must run."""
        result = self.result
        self._make_ready([Config(), *(family.start for family in families)])
        result.default = result.best_time = self._try(Config()) or float("inf")
        if result.default == float("inf"):
            raise ValueError("the default configuration does not run")
        begun = [(self._try(family.start), family) for family in families if self._in_time()]
        runs = sorted(((time, family) for time, family in begun if time is not None), key=lambda entry: entry[0])
        for place, (_, family) in enumerate(runs):
            left = max(self._end - self._clock(), 0.0)
            self._descend(family, self._clock() + left / (len(runs) - place))
        self._duel()
        return result

    def _in_time(self, end: float | None = None) -> bool:
        if self._clock() < (self._end if end is None else end):
            return True
        self.result.complete = False
        return False

    def _descend(self, family: Family, end: float) -> None:
        best, best_time = family.start, self.result.trials[family.start]
        assert best_time is not None
        improved = True
        while improved:
            improved = False
            for name, values in family.axes.items():
                candidates = [replace(best, **{name: value}) for value in values]
                new = [candidate for candidate in candidates if candidate not in self.result.trials]
                if new and not self._in_time(end):
                    return
                self._make_ready(new)
                for candidate in new:
                    if not self._in_time(end):
                        return
                    time = self._try(candidate)
                    if time is not None and time < best_time * (1 - NOISE):
                        best, best_time, improved = candidate, time, True

    def _make_ready(self, configs: Sequence[Config]) -> None:
        different = list(dict.fromkeys(configs))
        if len(different) > 1:
            self._compile(different)

    def _try(self, config: Config) -> float | None:
        result = self.result
        if config not in result.trials:
            time = self._measure(config)
            result.trials[config] = time
            if time is not None and time < result.best_time:
                result.best, result.best_time = config, time
            self._tell(result)
        return result.trials[config]

    def _duel(self) -> None:
        """Measure the best and the default again, by turns: the smallest of each counts."""
        result = self.result
        if result.best == Config():
            return
        for _ in range(DUELS):
            best, default = self._measure(result.best), self._measure(Config())
            result.best_time = min(result.best_time, best or result.best_time)
            result.default = min(result.default, default or result.default)
        if result.best_time >= result.default * (1 - NOISE):
            result.best, result.best_time = Config(), result.default
