"""The search: coordinate descent from the configuration that the cost model selects, within a time limit.

A family is a start configuration and, for some of its fields, alternative values. The search improves it field by
field: it measures every value of a field while the other fields keep their best values so far, until a whole pass
brings no improvement. This finds the optimum if the fields are independent, and the number of measurements is the sum
of the numbers of values rather than their product. Families (such as another kernel) are searched in the order of the
times of their start configurations; each may use an equal share of the remaining time.

Nearly all of the time is compilation (a second for a GEMM, ten for a mixture of experts; a measurement takes a tenth
of a second). So all values of a field are compiled in parallel before they are measured. Nothing is compiled during a
measurement, which would disturb it. Later fields are not compiled ahead, because their configurations include the best
value of this one.

Measurements are noisy. At the end, the best configuration and the default are measured again, alternately, and the
default is kept if it is not slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mkernel.runtime.config import Config

NOISE = 0.005  # relative difference below which times count as equal
DUELS = 2  # repeated measurements of the best configuration and the default, at the end


@dataclass(frozen=True)
class Family:
    """Configurations that differ from `start` in the fields of `axes`."""

    start: Config
    axes: Mapping[str, Sequence[int]]


@dataclass
class Result:
    """The result of a search. Times are in milliseconds; None stands for a configuration that does not run."""

    default: float
    best: Config = field(default_factory=Config)
    best_time: float = 0.0
    trials: dict[Config, float | None] = field(default_factory=dict)
    complete: bool = True  # False if time was up before the search was done

    @property
    def worst_time(self) -> float:
        return max(time for time in self.trials.values() if time is not None)


class Search:
    """One search. `measure` returns the time of a configuration, or None if it does not run. `on_result` is called
    after every measurement. `compile` prepares several configurations for measurement."""

    def __init__(
        self,
        measure: Callable[[Config], float | None],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        on_result: Callable[[Result], None] = lambda result: None,
        compile: Callable[[Sequence[Config]], None] = lambda configs: None,
    ):
        self._measure = measure
        self._compile = compile
        self._clock = clock
        self._on_result = on_result
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
        for i, (_, family) in enumerate(runs):
            left = max(self._end - self._clock(), 0.0)
            self._descend(family, self._clock() + left / (len(runs) - i))
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
            self._on_result(result)
        return result.trials[config]

    def _duel(self) -> None:
        """Measure the best configuration and the default again, alternately; the smallest time of each counts."""
        result = self.result
        if result.best == Config():
            return
        for _ in range(DUELS):
            best, default = self._measure(result.best), self._measure(Config())
            result.best_time = min(result.best_time, best or result.best_time)
            result.default = min(result.default, default or result.default)
        if result.best_time >= result.default * (1 - NOISE):
            result.best, result.best_time = Config(), result.default
