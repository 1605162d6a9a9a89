"""Run inside the machine with soft-RoCE: two processes, a node each, that multiply over verbs.

Importing torch takes half a minute there, so it is done once, before the ranks are forked.
"""

import os
import socket
import sys
import traceback
from collections.abc import Callable

import torch
from support.patience import WAIT

import mkernel as mk
from mkernel.net import Verbs, devices
from mkernel.net.config import transport_config
from mkernel.runtime import connect
from mkernel.runtime.errors import ArgumentError, TransportError
from mkernel.scale import calibrate


def refused(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")


def choices() -> None:
    """What is found and chosen here."""
    ports = devices.find_ports()
    assert [port.name for port in ports] == ["rxe0:1", "rxe1:1"], ports
    assert all(port.active and port.speaks_verbs and port.link_layer == "Ethernet" for port in ports), ports
    for port in ports:
        assert port.gids[0].address.is_link_local, port.gids
        assert devices.choose_gid(port) == 1, port.gids
    assert devices.choose_ports(ports) == ports  # two rails
    assert [port.device for port in devices.choose_ports(ports, names=["rxe1"])] == ["rxe1"]
    for wrong in ("mlx5_0", "rxe0:2"):
        refusal = refused(TransportError, lambda: devices.choose_ports(ports, names=[wrong]))
        assert "there are: rxe0:1 (Ethernet), rxe1:1 (Ethernet)" in refusal, refusal


def rank_main(rank: int) -> None:
    connect.TEST_SECONDS = WAIT  # the emulated machine has little time for all that runs in it
    wanted = Verbs(devices=("rxe0",) if rank == 0 else ("mlx5_3",))
    refusal = refused(TransportError, lambda: mk.init(transport=wanted, timeout=WAIT, gpus_per_node=1))
    assert "rank 1: there is no RDMA device 'mlx5_3' here" in refusal, refusal  # on both: none can go on alone
    group = mk.init(transport=Verbs(devices=(f"rxe{rank}",)), timeout=WAIT, gpus_per_node=1)
    assert (group.size, group.nodes) == (2, 2)
    m, n, k = 33, 20, 17
    torch.manual_seed(rank)
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    y, gathered = mk.all_gather_matmul(a, b, return_gathered=True)
    everyone = torch.cat(group.exchange("a", a))
    assert torch.equal(gathered, everyone)
    error = (y.double() - everyone.double() @ b.double()).abs().max().item()
    assert error <= 4 * k**0.5 * torch.finfo(a.dtype).eps, error
    for _ in range(2):  # segments come and go
        x = mk.empty(16, 16).fill_(1)
        group.barrier()
        del x
    group.close()
    auto = mk.init(timeout=WAIT, gpus_per_node=1)  # both devices, as two rails
    transport = auto.world.network.connection(auto).transport
    assert transport.kind == "verbs"
    assert [port[0] for port in transport.ports] == ["rxe0", "rxe1"]
    assert [port[2] for port in transport.ports] == [1, 1]
    auto.close()
    print("right over verbs: rank", rank, flush=True)
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["done"])  # it is in this process: the other may still be reading
    else:
        store.set("done", "1")


def calibration() -> None:
    """Between the two devices, in one process."""
    calibrate.ROUNDS = calibrate.TRANSFERS = calibrate.FLOODS = 2
    calibrate.PATIENCE = WAIT
    found, how = calibrate.measure_network()
    assert how == "RDMA (rxe0:1, rxe1:1)", how
    assert all(value > 0 for value in found.values()), found
    print("calibrated over verbs", flush=True)


def forked(function: Callable[..., None], *arguments: object) -> int:
    """The id of a process that calls a function, and exits with 0 if it returns."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return child


def code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def one_of_two(rank: int) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    rank_main(rank)


def main() -> int:
    choices()
    assert "'verbs'" in refused(ArgumentError, lambda: transport_config("infiniband"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    codes = [code_of(child) for child in [forked(one_of_two, rank) for rank in range(2)]]
    return max(*codes, code_of(forked(calibration)))


if __name__ == "__main__":
    sys.exit(main())
