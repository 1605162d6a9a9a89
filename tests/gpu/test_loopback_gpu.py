"""The loopback transport between memories of one GPU: the kernel of net/native/batch.h, as it is."""

import pytest
import torch
from net.harness import Producer

from mkernel.net import LoopbackTransport, Proxy

DATA, ROOM = 4096, (1 << 20) + 256
SIZES = [0, 1, 7, 16, 100, 4097, 16384, 16385, 65536, 1 << 20, (1 << 20) - 3]
PLACES = [(0, 0), (0, 1), (3, 0), (5, 5), (8, 24)]


@pytest.mark.parametrize("options", [{}, {"rate": 12.5e9, "latency": 5e-6}, {"shuffle": 1}])
def test_sizes_and_places(options):
    """All in flight together; not a byte more is written, and every signal."""
    cases = [(size, *place) for size in SIZES for place in PLACES]
    memories = [torch.randint(0, 256, (DATA + len(cases) * ROOM,), dtype=torch.uint8).cuda() for _ in range(2)]
    memories[1][:DATA] = 0
    expected = memories[1].clone()
    producer = Producer()
    for i, (size, here, there) in enumerate(cases):
        source, target = DATA + i * ROOM + here, DATA + i * ROOM + 64 + there
        expected[target : target + size] = memories[0][source : source + size]
        expected[8 * i : 8 * i + 8].view(torch.int64)[0] = i + 1
        producer.post(1, source=source, target=target, size=size, signal=8 * i, value=i + 1)
    torch.cuda.synchronize()
    with LoopbackTransport("sizes", 0, **options) as zero, LoopbackTransport("sizes", 1, **options) as one:
        zero.attach(0, memories[0])
        one.attach(0, memories[1])
        with Proxy(producer.ring, zero):
            producer.wait_sent(len(cases) - 1)
    assert torch.equal(memories[1], expected)
