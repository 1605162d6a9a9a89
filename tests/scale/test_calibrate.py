"""What `mkernel plan --calibrate` makes of timed calls: with times that the model itself gives for some GPU, the
constants of that GPU."""

import json
from dataclasses import replace

import pytest
import torch

from mkernel.scale import calibrate, calibrate_gpu
from mkernel.scale.calibrate_gpu import Result, constant_of, everything_timed, fit, seconds_of
from mkernel.scale.machine import load

# a GPU with fewer and slower SMs
OTHER = {
    "sm_flops": {"gemm": 5.0e12, "attention": 4.0e12, "attention_backward": 1.5e12}, "tile_seconds": 5e-6,
    "library_flops": {"gemm": 5e14, "attention": 4e14, "attention_backward": 3e14, "grouped": 3e14, "gated": 2e14},
    "tile_rates": {"128x128": 0.8, "64x128": 0.6}, "launch_seconds": 2e-5, "copy": 2e10, "nvlink_seconds": 4e-6,
    "sms": 100, "memory": 2e12,
}  # fmt: skip


@pytest.fixture(scope="module")
def other():
    return replace(load("h200-cx7"), **OTHER)


def timed_on(machine, gpus):
    results = []
    for operator, timed in everything_timed():
        rates = machine.library_flops
        flops = operator.load("model").work(calibrate_gpu.Problem(timed.shape, 2, timed.options), 1, timed.ranks).flops
        library = flops / rates[timed.library] if timed.library else 1.0
        results.append(Result(operator, timed, seconds_of(operator, timed, machine, gpus), library))
    return results


@pytest.mark.parametrize("gpus", [1, 2])
def test_constants_are_found_again(other, gpus):
    base = replace(load("h200-cx7"), sms=other.sms, memory=other.memory)
    found, names = fit(base, timed_on(other, gpus), gpus)
    constants = [timed.constant for _, timed in everything_timed() if timed.constant is not None]
    assert set(constants) <= set(names)
    assert {
        "sm_flops.gemm",
        "sm_flops.attention",
        "sm_flops.attention_backward",
        "tile_seconds",
        "copy",
        "launch_seconds",
        "nvlink_seconds",
        "tile_rates.128x128",
        "tile_rates.64x128",
    } == {*constants}
    for name in constants:
        assert constant_of(found, name) == pytest.approx(constant_of(other, name), rel=0.02), name
    assert found.library_flops == pytest.approx(other.library_flops)


def test_what_a_call_does_not_depend_on_stays(other):
    operator, timed = next(each for each in everything_timed() if each[1].constant == "tile_seconds")
    result = Result(operator, replace(timed, constant="copy"), 1e-3, 1e-3)
    assert fit(other, [result], 1)[0] == other


def test_a_machine_with_a_gpu(other, tmp_path, monkeypatch):
    """All of it, with a GPU that is made up."""
    for name in ("ROUNDS", "TRANSFERS", "FLOODS"):
        monkeypatch.setattr(calibrate, name, 2)
    properties = type("Properties", (), dict(multi_processor_count=other.sms, major=9, minor=0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(calibrate_gpu, "memory_rate", lambda device: other.memory)
    results = {(result.operator.name, result.timed.constant, result.timed.library): result
               for result in timed_on(other, 1)}  # fmt: skip
    monkeypatch.setattr(
        calibrate_gpu, "measure", lambda operator, timed: results[operator.name, timed.constant, timed.library]
    )
    told = []
    path = tmp_path / "here.json"
    _, how = calibrate.calibrate(path, "h200-cx7", told.append)
    assert how.endswith("; Some GPU")
    assert "the memory of the GPU" in told
    machine = load(str(path))
    assert machine.sms == other.sms
    assert machine.gpus_per_node == 1
    assert machine.sm_flops["gemm"] == pytest.approx(5e12, rel=0.02)
    assert "Some GPU" in machine.sources["sm_flops"]
    assert machine.sources["warp_copy"] == load("h200-cx7").sources["warp_copy"]
    assert "Some GPU, measured" in json.loads(path.read_text())["about"]
