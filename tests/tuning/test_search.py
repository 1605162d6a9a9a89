"""The search, with times from a formula and a clock that only measurements advance."""

from dataclasses import replace

import pytest

from mkernel.runtime.config import Config
from mkernel.tuning.search import Family, Result, Search


class Machine:
    """Measures by a formula; every measurement takes a second."""

    def __init__(self, formula):
        self.formula = formula
        self.now = 100.0
        self.asked = []
        self.compiled = []

    def measure(self, config):
        self.now += 1
        self.asked.append(config)
        return self.formula(config)

    def search(self, families, seconds=1000.0, on_result=lambda result: None):
        search = Search(self.measure, seconds, clock=lambda: self.now, on_result=on_result, compile=self.compile)
        return search.run(families)

    def compile(self, configs):
        assert not set(configs) & set(self.asked), "what was measured is compiled"
        self.compiled.append((len(self.asked), list(configs)))


def separable(config):
    """Best at ctas=32, chunk_rows=64, group_m=16; the default is ctas=33, chunk_rows=16, group_m=8."""
    time = 3.0
    time += {None: 0.2, 32: 0.0, 24: 1.0}[config.ctas]
    time += {None: 0.1, 32: 0.05, 64: 0.0, 128: 0.3}[config.chunk_rows]
    time += {None: 0.1, 4: 0.4, 16: 0.0}[config.group_m]
    return time


AXES = dict(ctas=(32, 24), chunk_rows=(32, 64, 128), group_m=(4, 16))


def test_finds_the_best_of_independent_fields_without_trying_all():
    machine = Machine(separable)
    result = machine.search([Family(Config(), AXES)])
    assert result.best == Config(ctas=32, chunk_rows=64, group_m=16)
    assert result.best_time == 3.0
    assert result.default == pytest.approx(3.4)
    assert result.worst_time > 1.1 * result.best_time
    assert result.complete
    assert machine.asked[0] == Config(), "the cost model's choice comes first"
    assert len(result.trials) < 3 * 4 * 3


def test_what_is_measured_next_is_compiled_together():
    """And nothing else is: all values of a field, with the best of the fields before it."""
    machine = Machine(separable)
    other = Family(Config(stages=3), dict(warps=(4, 8)))
    machine.formula = lambda config: separable(config) + (config.stages == 3) + (config.warps is not None)
    machine.search([Family(Config(), AXES), other])
    first = [Config(), Config(stages=3)]
    assert machine.compiled[0] == (0, first)
    for measured_before, configs in machine.compiled:
        assert machine.asked[measured_before : measured_before + len(configs)] == configs
    assert (2, [Config(ctas=32), Config(ctas=24)]) in machine.compiled
    assert (4, [Config(ctas=32, chunk_rows=rows) for rows in (32, 64, 128)]) in machine.compiled


def test_nothing_is_compiled_when_the_time_is_over():
    machine = Machine(separable)
    machine.search([Family(Config(), AXES)], seconds=2.5)
    assert machine.compiled == [(1, [Config(ctas=32), Config(ctas=24)])]


def test_the_time_is_kept():
    machine = Machine(separable)
    result = machine.search([Family(Config(), AXES)], seconds=3)
    assert not result.complete
    # three in time; then the best and the default twice more
    assert len(result.trials) == 3
    assert len(machine.asked) == 3 + 2 * 2
    assert result.best == Config(ctas=32)


def test_no_time_at_all_still_measures_the_default():
    result = Machine(separable).search([Family(Config(), AXES)], seconds=0)
    assert (result.best, list(result.trials), result.complete) == (Config(), [Config()], False)


def test_families_take_turns_by_their_beginnings():
    def formula(config):
        if config.stages is None:
            return 2.0 if config.ctas is None else 1.9
        return 1.5 if config.ctas is None else 1.2

    machine = Machine(formula)
    families = [Family(Config(), dict(ctas=(8,))), Family(Config(stages=3), dict(ctas=(8,)))]
    result = machine.search(families)
    assert result.best == Config(stages=3, ctas=8)
    assert machine.asked[:4] == [Config(), Config(stages=3), Config(stages=3, ctas=8), Config(ctas=8)]


def test_configurations_that_do_not_run_are_passed_over():
    def formula(config):
        return None if config.ctas == 32 or config.stages == 3 else 2.0 - (config.group_m or 0) / 100

    result = Machine(formula).search([Family(Config(), AXES), Family(Config(stages=3), AXES)])
    assert result.best == Config(group_m=16)
    assert result.trials[Config(ctas=32)] is None
    assert result.worst_time == 2.0
    assert sum(config.stages == 3 for config in result.trials) == 1


def test_a_default_that_does_not_run_is_an_error():
    with pytest.raises(ValueError, match="default configuration does not run"):
        Machine(lambda config: None).search([])


def test_a_lucky_measurement_does_not_win():
    """Measured once it looked better, measured again it is not: the default stays."""
    machine = Machine(None)

    def formula(config):
        lucky = config.group_m == 16 and machine.asked.count(config) == 1
        return 2.5 if lucky else 3.0 - (0.7 if config == Config() and len(machine.asked) > 5 else 0.0)

    machine.formula = formula
    result = machine.search([Family(Config(), AXES)])
    assert result.best == Config()
    assert result.best_time == result.default == pytest.approx(2.3)


def test_differences_within_the_noise_are_none():
    result = Machine(lambda config: 3.0 if config == Config() else 2.99).search([Family(Config(), AXES)])
    assert result.best == Config()
    assert result.best_time == result.default


def test_every_measurement_is_told():
    told = []
    machine = Machine(separable)
    machine.search(
        [Family(Config(), AXES)], on_result=lambda result: told.append((len(result.trials), result.best_time))
    )
    assert [count for count, _ in told] == list(range(1, len(told) + 1))
    assert told[-1][1] == 3.0


def test_never_worse_than_the_default():
    """Whatever the machine says."""
    for seed in range(50):
        times = {}

        def formula(config, seed=seed, times=times):
            return times.setdefault(config, 1 + hash((seed, config)) % 1000 / 1000)

        result = Machine(formula).search([Family(Config(), AXES), Family(Config(stages=3), AXES)])
        assert isinstance(result, Result)
        assert result.best_time <= result.default
        assert result.best in result.trials
        assert replace(result.best) == result.best
