"""`mkernel plan --calibrate` on a GPU: what it measures, and that the model then takes as long as the calls did."""

import json

import pytest
import torch

from mkernel.scale import calibrate, calibrate_gpu
from mkernel.scale.machine import load

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_machine_of_this_gpu(tmp_path, monkeypatch):
    measured = []
    measure = calibrate_gpu.measure

    def kept(operator, timed):
        measured.append(measure(operator, timed))
        return measured[-1]

    monkeypatch.setattr(calibrate_gpu, "measure", kept)
    path = tmp_path / "here.json"
    calibrate.calibrate(path, "h200-cx7", lambda what: print("measuring", what, flush=True))
    machine = load(str(path))
    print(json.dumps(json.loads(path.read_text()), indent=1))
    assert machine.sms == torch.cuda.get_device_properties(0).multi_processor_count
    assert machine.sources["sm_flops"].startswith("measured: ")
    for result in measured:
        if result.timed.constant is not None:
            found = calibrate_gpu.seconds_of(result.operator, result.timed, machine, torch.cuda.device_count())
            print(result.operator.name, result.timed.constant, result.seconds, found)
            assert found == pytest.approx(result.seconds, rel=0.1)
