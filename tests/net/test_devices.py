"""Which device and which GID: read from trees that look like /sys of real machines."""

from pathlib import Path

import pytest

from mkernel.net import devices
from mkernel.runtime.errors import TransportError

LINK_LOCAL = "fe80:0000:0000:0000:0000:00ff:fe00:0001"
NOTHING = "0000:0000:0000:0000:0000:0000:0000:0000"


def mapped(address: str) -> str:
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


class Sysfs:
    """A tree that is built up."""

    def __init__(self, root: Path):
        self.root = root
        (root / "class/infiniband").mkdir(parents=True)
        (root / "bus/pci/devices").mkdir(parents=True)

    def pci(self, *way: str, numa: int = 0) -> Path:
        directory = self.root.joinpath("devices", *way)
        directory.mkdir(parents=True)
        (directory / "numa_node").write_text(f"{numa}\n")
        (self.root / "bus/pci/devices" / way[-1]).symlink_to(directory)
        return directory

    def device(self, name, at, *, state="4: ACTIVE", layer="InfiniBand", rate=400, gids=None, driver="mlx5_core",
               node_type="1: CA", ports=1):  # fmt: skip
        directory = (at or self.root / "devices/virtual") / "infiniband" / name
        directory.mkdir(parents=True)
        (self.root / "class/infiniband" / name).symlink_to(directory)
        (directory / "node_type").write_text(node_type + "\n")
        if at is not None:
            (directory / "device").symlink_to(at)
            drivers = self.root / "bus/pci/drivers" / driver
            drivers.mkdir(parents=True, exist_ok=True)
            if not (at / "driver").exists():
                (at / "driver").symlink_to(drivers)
        for number in range(1, ports + 1):
            port = directory / "ports" / str(number)
            for kind in ("gids", "gid_attrs/types"):
                (port / kind).mkdir(parents=True)
            (port / "state").write_text(state + "\n")
            (port / "link_layer").write_text(layer + "\n")
            (port / "rate").write_text(f"{rate} Gb/sec (4X NDR)\n")
            for index, (address, kind) in enumerate(gids or [("fe80:0000:0000:0000:a088:c203:0000:0001", "")]):
                (port / "gids" / str(index)).write_text(address + "\n")
                if kind:
                    (port / "gid_attrs/types" / str(index)).write_text(kind + "\n")

    def ports(self):
        return devices.find_ports(self.root)

    def gpu(self, address):
        return devices.gpu_location(address, self.root)


@pytest.fixture
def sysfs(tmp_path):
    return Sysfs(tmp_path / "sys")


def names(ports):
    return [port.name for port in ports]


def choose(sysfs, gpu=None, **options):
    return names(devices.choose_ports(sysfs.ports(), gpu=None if gpu is None else sysfs.gpu(gpu), **options))


@pytest.fixture
def server(sysfs):
    """Two sockets; in each two switches with a GPU and its card, and a slow card of another kind beside."""
    for socket, (bridge, buses) in enumerate([("pci0000:10", (0x11, 0x21)), ("pci0000:80", (0x81, 0x91))]):
        for index, bus in enumerate(buses):
            number = 2 * socket + index
            top = (bridge, f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0")
            sysfs.pci(*top, f"0000:{bus + 2:02x}:00.0", f"0000:{bus + 4:02x}:00.0", numa=socket)
            card = sysfs.pci(*top, f"0000:{bus + 3:02x}:00.0", f"0000:{bus + 5:02x}:00.0", numa=socket)
            sysfs.device(f"mlx5_{number}", card)
    storage = sysfs.pci("pci0000:10", "0000:31:01.0", "0000:32:00.0", numa=0)
    sysfs.device("mlx5_9", storage, layer="Ethernet", rate=100, gids=[(mapped("10.0.0.9"), "RoCE v2")])
    return sysfs


@pytest.mark.parametrize(
    ("gpu", "card"),
    [("0000:15:00.0", "mlx5_0"), ("0000:25:00.0", "mlx5_1"), ("0000:85:00.0", "mlx5_2"), ("0000:95:00.0", "mlx5_3")],
)
def test_the_card_below_the_same_switch(server, gpu, card):
    assert choose(server, gpu) == [f"{card}:1"]


def test_without_a_gpu_the_fastest_as_rails(server):
    assert choose(server) == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1"]
    assert len(choose(server)) <= devices.MOST_RAILS


def test_two_cards_below_the_switch_are_two_rails(server):
    second = server.pci("pci0000:10", "0000:11:01.0", "0000:12:00.0", "0000:19:00.0", "0000:1a:00.0")
    server.device("mlx5_5", second)
    assert choose(server, "0000:15:00.0") == ["mlx5_0:1", "mlx5_5:1"]


def test_the_same_host_bridge_then_the_same_numa_node(sysfs):
    sysfs.pci("pci0000:10", "0000:11:00.0", "0000:12:00.0", numa=1)
    sysfs.device("far", sysfs.pci("pci0000:30", "0000:31:00.0", "0000:32:00.0", numa=0))
    assert choose(sysfs, "0000:12:00.0") == ["far:1"]
    sysfs.device("numa", sysfs.pci("pci0000:40", "0000:41:00.0", "0000:42:00.0", numa=1))
    assert choose(sysfs, "0000:12:00.0") == ["numa:1"]
    sysfs.device("bridge", sysfs.pci("pci0000:10", "0000:13:00.0", "0000:14:00.0", numa=1))
    assert choose(sysfs, "0000:12:00.0") == ["bridge:1"]
    sysfs.device("switch", sysfs.pci("pci0000:10", "0000:11:00.0", "0000:15:00.0", numa=1), rate=100)
    assert choose(sysfs, "0000:12:00.0") == ["switch:1"]


def test_cards_that_are_down_or_of_another_kind_are_not_taken(sysfs):
    near = sysfs.pci("pci0000:10", "0000:11:00.0", "0000:12:00.0")
    sysfs.pci("pci0000:10", "0000:11:00.0", "0000:13:00.0")
    far = sysfs.pci("pci0000:30", "0000:31:00.0", "0000:32:00.0")
    sysfs.device("down", near, state="1: DOWN")
    sysfs.device("iwarp", near, node_type="4: RNIC", layer="Ethernet", gids=[(mapped("10.0.0.1"), "")])
    sysfs.device("noaddress", near, layer="Ethernet", gids=[(NOTHING, "")])
    with pytest.raises(TransportError, match=r"no active InfiniBand or RoCE device.*down:1 \(InfiniBand, not active\)"):
        choose(sysfs, "0000:13:00.0")
    sysfs.device("good", far)
    assert choose(sysfs, "0000:13:00.0") == ["good:1"]


def test_efa_is_another_kind(sysfs):
    place = sysfs.pci("pci0000:10", "0000:11:00.0", "0000:12:00.0")
    sysfs.device("rdmap18s0", place, layer="Unspecified", driver="efa", node_type="7: <unknown>", rate=100)
    with pytest.raises(TransportError, match="no active InfiniBand or RoCE device"):
        choose(sysfs)
    assert choose(sysfs, efa=True) == ["rdmap18s0:1"]
    sysfs.device("mlx5_0", sysfs.pci("pci0000:10", "0000:13:00.0"))
    assert choose(sysfs) == ["mlx5_0:1"]
    assert choose(sysfs, efa=True) == ["rdmap18s0:1"]


def test_names(server):
    server.device("dual", server.pci("pci0000:10", "0000:41:00.0"), ports=2)
    assert choose(server, "0000:15:00.0", names=["mlx5_3", "dual:2"]) == ["mlx5_3:1", "dual:2"]
    with pytest.raises(TransportError, match=r"no RDMA device 'mlx4_0' here; there are: dual:1 \(InfiniBand\), dual:2"):
        choose(server, names=["mlx4_0"])
    with pytest.raises(TransportError, match="no RDMA device 'mlx5_0:2'"):
        choose(server, names=["mlx5_0:2"])
    with pytest.raises(TransportError, match="devices is empty"):
        choose(server, names=[])
    server.device("down", server.pci("pci0000:10", "0000:43:00.0"), state="1: DOWN")
    with pytest.raises(TransportError, match="RDMA device down is not active"):
        choose(server, names=["down"])


def test_a_machine_without_devices(tmp_path):
    assert devices.find_ports(tmp_path) == []
    with pytest.raises(TransportError, match="no active InfiniBand or RoCE device on this machine; RDMA devices: none"):
        devices.choose_ports([])
    with pytest.raises(TransportError, match="no active EFA device on this machine"):
        devices.choose_ports([], efa=True)
    assert devices.gpu_location("0000:15:00.0", tmp_path) == devices.Location()


GLOBAL_6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
UNIQUE_LOCAL = "fd00:0000:0000:0000:0000:0000:0000:0001"


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ([(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (mapped("10.1.2.3"), "IB/RoCE v1"),
          (mapped("10.1.2.3"), "RoCE v2")], 3),  # what a ConnectX port with one IPv4 address has
        ([(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2")], 1),
        ([(LINK_LOCAL, "RoCE v2"), (GLOBAL_6, "RoCE v2"), (mapped("192.168.0.1"), "RoCE v2")], 2),
        ([(LINK_LOCAL, "RoCE v2"), (UNIQUE_LOCAL, "RoCE v2"), (mapped("169.254.3.4"), "RoCE v2")], 1),
        ([(LINK_LOCAL, "RoCE v2"), (mapped("169.254.3.4"), "RoCE v2")], 1),
        ([(NOTHING, ""), (NOTHING, ""), (mapped("10.1.2.3"), "RoCE v2")], 2),
        ([(mapped("10.1.2.3"), "RoCE v2"), (mapped("10.1.2.4"), "RoCE v2")], 0),
        ([(mapped("10.1.2.3"), "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2")], 1),
    ],
)  # fmt: skip
def test_gid_of_roce(sysfs, gids, index):
    sysfs.device("mlx5_0", None, layer="Ethernet", gids=gids)
    (port,) = sysfs.ports()
    assert devices.choose_gid(port) == index


def test_gid_of_infiniband_and_none(sysfs):
    sysfs.device("ib", None, gids=[(LINK_LOCAL, ""), (GLOBAL_6, "")])
    sysfs.device("roce", None, layer="Ethernet", gids=[(NOTHING, "")])
    ib, roce = sysfs.ports()
    assert devices.choose_gid(ib) == 0
    with pytest.raises(TransportError, match="roce:1 has no GID; its network interface needs an address"):
        devices.choose_gid(roce)
