"""ring_attention on GPUs: both kernels, several ranks, several calls, peers that do not come."""

import time

import pytest
import torch
from support.attention_reference import Case, assert_attention, exact

import mkernel as mk
from mkernel.lang.context import EPOCH, GRID_SYNC
from mkernel.ops.attention import schedule

pytestmark = pytest.mark.gpu

SENTINEL = -77.0
KERNELS = {"default": None, "triton": mk.Config(warps=8)}  # the Gluon kernel has no such setting


def cuda(fn, *args, ranks=2, nodes=1, **kwargs):
    kwargs.setdefault("timeout", 10.0)
    return mk.spawn(fn, *args, nodes=nodes, gpus_per_node=ranks, device="cuda", **kwargs)


def parts(group, case, turn=0):
    return [case.part(name, group.rank, turn).to(group.device) for name in ("query", "key", "value")]


def check(group, case, out, lse, turn=0):
    group.synchronize()
    assert_attention(out, lse, exact(case, group.rank, group.size, turn, device=group.device), case)


def call(group, case, turn=0, **arguments):
    out, lse = mk.ring_attention(
        *parts(group, case, turn), return_lse=True, group=group, **case.arguments(), **arguments
    )
    check(group, case, out, lse, turn)
    return out


BF16 = torch.bfloat16
CASES = {
    "plain": Case(512, heads=4, kv_heads=4, batch=2, dim=128, dtype=BF16),
    "causal": Case(512, heads=4, kv_heads=4, dim=128, dtype=BF16, causal=True),
    "zigzag": Case(640, heads=4, kv_heads=1, dim=128, dtype=BF16, causal=True, layout="zigzag"),
    "ragged": Case(333, heads=3, kv_heads=3, batch=2, dim=128, dtype=BF16),
    "ragged, causal, zigzag": Case(334, heads=8, kv_heads=2, dim=128, dtype=BF16, causal=True, layout="zigzag"),
    "zigzag, odd": Case(335, heads=4, kv_heads=2, dim=128, dtype=BF16, causal=True, layout="zigzag"),
    "one row": Case(1, heads=2, kv_heads=2, dim=128, dtype=BF16, causal=True),
    "64": Case(300, heads=2, kv_heads=2, dim=64, dtype=torch.float16, causal=True),
    "96": Case(300, heads=2, kv_heads=2, dim=96, dtype=BF16, causal=True),
    "256": Case(300, heads=2, kv_heads=2, dim=256, dtype=BF16, causal=True),
    "window": Case(640, heads=4, kv_heads=2, dim=128, dtype=BF16, causal=True, layout="zigzag", window=(200, 0)),
    "window, both sides": Case(500, heads=2, kv_heads=2, dim=64, dtype=BF16, window=(130, 70)),
    "capped": Case(333, heads=2, kv_heads=2, dim=128, dtype=BF16, causal=True, softcap=3.0),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_cases(kernel, ranks, name):
    def on_rank(group):
        for turn in range(2):
            call(group, CASES[name], turn, config=KERNELS[kernel])

    cuda(on_rank, ranks=ranks)


UNEQUAL = [(300, 0, 1, 517), (64, 128, 640, 200)]


@pytest.mark.parametrize("lengths", UNEQUAL, ids=str)
@pytest.mark.parametrize("nodes", [1, 2])
def test_other_numbers_on_each_rank(nodes, lengths):
    """In turn with a call in which all hold the same number, which runs another binary."""
    case = Case(0, heads=4, kv_heads=2, dim=128, dtype=BF16, causal=True, seq_lens=lengths)

    def on_rank(group):
        for turn in range(3):
            call(group, case, turn)
            call(group, CASES["causal"], turn)

    cuda(on_rank, ranks=4 // nodes, nodes=nodes)


LENGTHS = {
    "one query": Case(5000, queries=1, heads=8, kv_heads=2, dim=128, dtype=BF16, causal=True),
    "few queries": Case(3000, queries=40, heads=2, kv_heads=2, dim=64, dtype=torch.float16, causal=True),
    "a cache": Case(1500, queries=300, heads=4, kv_heads=4, batch=2, dim=128, dtype=BF16, causal=True),
    "fewer keys": Case(200, queries=333, heads=2, kv_heads=2, dim=128, dtype=BF16, causal=True),
    "192 and 128": Case(600, heads=4, kv_heads=4, dim=192, value_dim=128, dtype=BF16, causal=True),
    "192 and 128, one query": Case(4000, queries=1, heads=4, kv_heads=4, dim=192, value_dim=128, dtype=BF16),
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_lengths(ranks, name):
    """More or fewer queries than keys, values of another head dimension; few tiles are shared by several CTAs."""
    case = LENGTHS[name]

    def on_rank(group):
        first = call(group, case)
        call(group, case, 1)
        assert torch.equal(call(group, case), first)
        shared = mk.explain("ring_attention", *parts(group, case), **case.arguments()).config.team_ctas > 1
        assert shared or case.rows > 40

    cuda(on_rank, ranks=ranks)


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_nodes(kernel):
    def on_rank(group):
        for turn in range(3):
            call(group, CASES["ragged, causal, zigzag"], turn, config=KERNELS[kernel])

    cuda(on_rank, ranks=2, nodes=2)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_documents(kernel, layout):
    case = Case(
        320, heads=4, kv_heads=4, dim=128, dtype=BF16, causal=True, layout=layout,
        documents=(0, 1, 100, 321, 350, 700, 940, 960),
    )  # fmt: skip

    def on_rank(group):
        for turn in range(2):
            call(group, case, turn, config=KERNELS[kernel])

    cuda(on_rank, ranks=3)


def test_which_kernel_is_taken():
    def on_rank(group):
        q, k, v = parts(group, CASES["plain"])
        hopper = torch.cuda.get_device_capability()[0] == 9
        assert mk.explain("ring_attention", q, k, v).kernel == ("gluon" if hopper else "triton")
        assert mk.explain("ring_attention", q, k, v, config=KERNELS["triton"]).kernel == "triton"
        assert mk.explain("ring_attention", q.float(), k.float(), v.float()).kernel == "triton"

    cuda(on_rank, ranks=1)


@pytest.mark.parametrize("kernel", KERNELS)
def test_few_slots(kernel):
    """Room for two of eight rounds: every slot is used four times, with credits."""
    case = Case(512, heads=8, kv_heads=8, dim=128, dtype=BF16, causal=True, layout="zigzag")
    config = mk.Config(steps=1, warps=8) if kernel == "triton" else mk.Config(steps=1)

    def on_rank(group):
        plan = mk.explain("ring_attention", *parts(group, case), config=config, **case.arguments())
        assert plan.credits
        assert plan.window == 2
        for turn in range(5):
            call(group, case, turn, config=config)

    cuda(on_rank, ranks=4)


def test_heads_in_parts():
    case = Case(1024, heads=2, kv_heads=1, dim=128, dtype=BF16, causal=True)
    config = mk.Config(steps=2)

    def on_rank(group):
        assert mk.explain("ring_attention", *parts(group, case), config=config, **case.arguments()).parts > 1
        for turn in range(3):
            call(group, case, turn, config=config)

    cuda(on_rank, ranks=4)


@pytest.mark.parametrize("dim", [64, 128])
def test_fp32(dim):
    case = Case(200, heads=2, kv_heads=2, dim=dim, causal=True)
    cuda(lambda group: call(group, case), ranks=2)


def test_layouts_in_memory_and_out():
    """Heads beside rows, as models have them; columns first, which TMA cannot read; a frame around out."""
    case = Case(256, heads=4, kv_heads=4, batch=2, dim=128, dtype=BF16, causal=True)

    def on_rank(group):
        q, k, v = parts(group, case)
        beside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        columns = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
        for tensors in (beside, columns):
            frame = torch.full((2, 256, 6, 144), SENTINEL, device=group.device, dtype=BF16)
            out = frame[:, :, 1:5, 8:136].transpose(1, 2)
            result, lse = mk.ring_attention(*tensors, is_causal=True, out=out, return_lse=True)
            assert result is out
            check(group, case, out, lse)
            out.fill_(SENTINEL)
            assert (frame == SENTINEL).all()

    cuda(on_rank, ranks=2)


def test_many_calls_without_synchronisation():
    def on_rank(group):
        names = ["causal", "zigzag", "ragged"]
        calls = []
        for turn in range(30):
            case = CASES[names[turn % 3]]
            calls.append((case, turn, mk.ring_attention(*parts(group, case, turn), **case.arguments())))
        group.synchronize()
        for case, turn, out in calls[-6:]:
            check(group, case, out, None, turn)

    cuda(on_rank, ranks=4)


def test_same_bits_every_time():
    case = CASES["zigzag"]

    def on_rank(group):
        tensors = parts(group, case)
        results = [mk.ring_attention(*tensors, **case.arguments()) for _ in range(5)]
        group.synchronize()
        assert all(torch.equal(results[0], other) for other in results)

    cuda(on_rank, ranks=3)


def test_larger():
    case = Case(2048, heads=8, kv_heads=8, dim=128, dtype=BF16, causal=True, layout="zigzag")

    def on_rank(group):
        call(group, case)
        call(group, case, 1)

    cuda(on_rank, ranks=4)


def test_late_rank():
    case = CASES["causal"]

    def on_rank(group):
        for i in range(5):
            tensors = parts(group, case)
            if group.rank == i % group.size:
                torch.cuda._sleep(20_000_000)
            out = mk.ring_attention(*tensors, is_causal=True)
        check(group, case, out, None)

    cuda(on_rank, ranks=3)


def test_captured_graph_is_replayed():
    case = CASES["causal"]

    def on_rank(group):
        stream = torch.cuda.current_stream()
        tensors = parts(group, case)
        out = torch.empty_like(tensors[0])
        mk.ring_attention(*tensors, is_causal=True, out=out)
        group.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            mk.ring_attention(*tensors, is_causal=True, out=out)
        for turn in range(1, 4):
            for tensor, new in zip(tensors, parts(group, case, turn)):
                tensor.copy_(new)
            graph.replay()
            check(group, case, out, None, turn)

    cuda(on_rank, ranks=1)


@pytest.mark.parametrize("kernel", KERNELS)
def test_dead_peer_is_reported_and_the_others_go_on(kernel):
    case = CASES["plain"]

    def on_rank(group):
        call(group, case, config=KERNELS[kernel])
        if group.rank == 2:
            return None
        out = mk.ring_attention(*parts(group, case), config=KERNELS[kernel])
        begun = time.monotonic()
        with pytest.raises(mk.CommTimeout) as caught:
            group.synchronize()
        assert time.monotonic() - begun < 5.0
        assert caught.value.record.op == "ring_attention"
        assert out.isnan().any()
        left = group.subset([0, 1, 3])
        call(left, case, config=KERNELS[kernel])
        return caught.value.record.peer

    assert set(cuda(on_rank, ranks=4, timeout=1.0)) - {None} == {2}


@pytest.mark.parametrize(("ranks", "nodes", "layout"), [(1, 1, "contiguous"), (2, 1, "zigzag"), (1, 2, "contiguous")])
def test_grid_syncs(monkeypatch, ranks, nodes, layout):
    """As they do where keys are many, all of them, at every mark; twice, so that the second call begins with what the
    first has counted."""
    monkeypatch.setattr(schedule, "SYNC_BYTES", 0)
    case = Case(
        4096 // (ranks * nodes), heads=16, kv_heads=16, batch=2, dim=128, dtype=BF16, causal=True, layout=layout
    )
    config = mk.Config(ctas=8)

    def on_rank(group):
        plan = mk.explain("ring_attention", *parts(group, case), is_causal=True, layout=layout, config=config)
        marks = int((plan.schedule >= schedule.SYNC_MARK).sum())
        assert marks >= 2 * (8 - plan.config.send_ctas)
        assert "CTAs wait for each other" in str(plan)
        for turn in range(2):
            call(group, case, turn, config=config)
            (state,) = (workspace.state.tolist() for workspace in group._workspaces.values())
            assert state[GRID_SYNC.value] == state[EPOCH.value] * 2**32 + marks

    cuda(on_rank, ranks=ranks, nodes=nodes)


def test_paced_links_take_their_time():
    case = Case(2048, heads=8, kv_heads=8, dim=128, dtype=BF16)

    def on_rank(group):
        tensors = parts(group, case)
        mk.ring_attention(*tensors)
        group.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        group.barrier()
        torch.cuda._sleep(100_000_000)  # 50 ms in which the hosts call: their time is not the link's
        start.record()
        out = mk.ring_attention(*tensors)
        end.record()
        check(group, case, out, None)
        return start.elapsed_time(end)

    times = cuda(on_rank, ranks=2, links=mk.Links(nvlink=1.0))
    wire = 2 * 8 * 2048 * 128 * 2 / 1e9 * 1e3
    assert wire * 0.95 <= min(times) <= max(times) < wire * 1.5
