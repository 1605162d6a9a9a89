"""PyTorch's TokenSwitch with mkernel's operators behind it, in the simulator, beside float64. The base class is that of
PyTorch where it has one (from 2.15 on), otherwise a stand-in."""

import importlib
import importlib.util

import pytest
import torch
from support import token_switch_stand_in as stand_in
from support.moe_gradients import check_all, exact_rows, gradient_of, leaf, some_function
from support.moe_reference import Layer, check_rows
from support.operator_calls import cluster_name, run

import mkernel as mk

LAYER = Layer((9, 5), (2, 2), hidden=24, dtype=torch.float32)
MOST = 9 * 2 * 2  # rows of a rank


@pytest.fixture
def integration(monkeypatch):
    if importlib.util.find_spec("torch.distributed._token_switch") is None:
        stand_in.install(monkeypatch)
    return importlib.import_module("mkernel.integrations.token_switch")


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
@pytest.mark.parametrize("rows", [MOST, MOST - 3])
def test_dispatch_and_combine(cluster, rows, integration):
    def work(group):
        rank = group.rank
        switch = integration.TokenSwitch(group, 4, 9, MOST, 96)
        x, weights = leaf(group, LAYER.x(rank)), LAYER.weights(rank).nan_to_num(0.0)
        counts = torch.full((5,), -1, dtype=torch.int32)
        routing = switch.create_routing(LAYER.ids(rank), counts, layout="expert_major")
        assert counts.tolist() == [*check_rows(LAYER, rank, routing.handle), -1, -1, -1]
        y, row_weights, ids = switch.dispatch(routing, x, weights, rows)
        expected = LAYER.dispatched(rank)
        assert ids is None
        assert torch.equal(y[: len(expected)], expected)
        assert not y[len(expected) :].any()
        assert not row_weights[len(expected) :].any()
        out = switch.combine(routing, some_function(y) * row_weights[:, None])
        dout = gradient_of(LAYER, rank, 0, LAYER.hidden)
        out.backward(dout)
        check_all(LAYER, rank, dict(x=x.grad), exact_rows(LAYER))

        # a second dispatch along the same routing, to given memory; combine of the rows that matter
        given = torch.full((MOST + 2, 24), 7.0), torch.full((MOST + 2,), 7.0), None
        assert switch.dispatch(routing, x, weights, out=given) is given
        assert torch.equal(given[0][:rows], y)
        assert not given[0][rows:].any()
        again = torch.full_like(out, 7.0)
        switch.combine(routing, (some_function(given[0]) * given[1][:, None])[: len(expected)], out=again)
        assert torch.equal(again, out)

    run(work, cluster=cluster)


def test_what_is_refused(integration):
    def work(group):
        with pytest.raises(mk.ArgumentError, match="num_experts is 5, which 2 ranks cannot divide equally"):
            integration.TokenSwitch(group, 5, 9, MOST)
        switch = integration.TokenSwitch(group, 4, 9, MOST)
        routing = switch.create_routing(LAYER.ids(group.rank), layout="expert_major")
        x, weights = LAYER.x(group.rank), LAYER.weights(group.rank)
        for message, given in {
            r"tokens has 4 rows, but the routing is that of \d tokens": (x[:4], weights),
            "tokens has dtype torch.float64": (x.double(), weights),
            r"topk_weights is \(\d, 1\), but must be": (x, weights[:, :1]),
            "topk_weights has dtype torch.int64": (x, weights.nan_to_num().long()),
        }.items():
            with pytest.raises(mk.ArgumentError, match=message):
                switch.dispatch(routing, *given, MOST)
        switch = integration.TokenSwitch(group, 4, 9, 1)
        with pytest.raises(mk.ArgumentError, match="layout must be 'expert_major', got 'flat'"):
            switch.create_routing(LAYER.ids(group.rank), layout="flat")
        with pytest.raises(mk.CapacityError, match="whose capacity is 1"):
            switch.create_routing(LAYER.ids(group.rank), layout="expert_major")

    run(work, cluster=(1, 2))


def test_rows_that_are_left_out_are_nan(integration):
    def work(group):
        rank = group.rank
        switch = integration.TokenSwitch(group, 4, 9, MOST)
        routing = switch.create_routing(LAYER.ids(rank), layout="expert_major")
        rows = int(routing.handle.counts.sum())
        y, _, _ = switch.dispatch(routing, LAYER.x(rank), LAYER.weights(rank).nan_to_num(0.0), rows - 1)
        lacking = group.exchange("lacking", (int(routing.handle.source[rows - 1]), int(routing.handle.token[rows - 1])))
        out = switch.combine(routing, y)
        assert {(rank, int(token)) for token in out.isnan().any(1).nonzero()} == {at for at in lacking if at[0] == rank}

    run(work, cluster=(1, 2))
