"""Whoever can reach the process group's store: what they can read there, and what they can make a rank do."""

import pytest
from support.forked_processes import run_ranks

WATCHED = """
    import os, pickle, sys
    import torch
    import torch.distributed as dist
    import mkernel as mk
    from support.patience import WAIT

    def trap(*_):
        print("code ran", flush=True)
        os._exit(7)

    pickle.loads = pickle.load = trap  # torch's own C++ code does not use it

    class Trap:
        def __reduce__(self):
            return os._exit, (7,)

    written = []

    class Watched:
        '''Writes down what goes into the store.'''
        def __init__(self, store):
            self.store = store
        def set(self, name, value):
            written.append((name, bytes(value, "utf-8") if isinstance(value, str) else bytes(value)))
            return self.store.set(name, value)
        def __getattr__(self, name):
            return getattr(self.store, name)

    PrefixStore = dist.PrefixStore
    dist.PrefixStore = lambda prefix, store: Watched(PrefixStore(prefix, store))
    os.environ.update({environment})
"""

READ = """
    group = mk.init(timeout=WAIT, gpus_per_node=1)
    a = torch.ones(16, 16)
    assert (mk.all_gather_matmul(a, a) == 16).all()
    messages = group.world.exchange.messages
    assert len(messages.key) == 32
    everything = b"".join(value for _, value in written)
    assert messages.key not in everything
    assert messages.key.hex().encode() not in everything
    assert b"of the launcher" not in everything
    keys = {{each for each in group.exchange("keys", messages.key)}}
    assert len(keys) == 1, "all ranks have the same"
    names = [name for name, _ in written]
    assert len(names) > 10 and all(value.count(b"\\x80\\x04\\x95") == 0 for _, value in written), "a pickle"
    group.close()
    print("right on rank", group.rank, flush=True)
    dist.barrier()
"""


@pytest.mark.parametrize("environment", [{}, {"MKERNEL_SECRET": "a secret of the launcher"}])
def test_the_secret_is_not_in_the_store(environment):
    for rank, (output, code) in enumerate(run_ranks(WATCHED.format(environment=environment) + READ.format(), 2)):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output


FORGED = """
    group = mk.init(timeout=WAIT)
    a = torch.ones(16, 16)
    assert (mk.all_gather_matmul(a, a) == 16).all()
    group.barrier()
    messages, number = group.world.exchange.messages, group._exchanges + 1
    name = messages.names(group.members, (group.name, number))[1]
    good = dict(written)[messages.names(group.members, (group.name, number - 1))[group.rank]]
    if group.rank == 1:
        # what a stranger could put in rank 1's place before rank 1 comes
        trapped = (0).to_bytes(4, "big") + pickle.dumps(Trap())
        forged = dict(pickle=trapped, copied=good, long=b"\\xff" * 4 + b"x", short=b"")
        messages.store.set(name, forged[{how!r}])
        messages.store.set("forged", b"1")
    else:
        while not messages.store.check(["forged"]):
            pass
        try:
            group.barrier()  # known calls do not use the store
            sys.exit("taken")
        except mk.MKernelError as refusal:
            print("refused:", refusal, flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("how", ["pickle", "copied", "long", "short"])
def test_what_a_stranger_wrote_is_refused(how):
    (zero, code), (one, other) = run_ranks(WATCHED.format(environment={}) + FORGED.format(how=how), 2)
    assert (code, other) == (0, 0), zero + one
    assert "refused: " in zero, zero
    assert "for rank 1" in zero or "not one of this job" in zero, zero
    assert "code ran" not in zero + one, zero + one


def test_what_one_rank_refuses_before_it_knows_the_others():
    """They do not wait for it until their timeout."""
    program = """
        import os
        from support.patience import HANG
        import mkernel as mk

        for wrong in ("secret", "transport"):
            here = os.environ["RANK"] == "1"
            os.environ["MKERNEL_SECRET"] = "short" if here and wrong == "secret" else "0123456789abcdef"
            try:
                mk.init(timeout=2 * HANG, transport="tpc" if here and wrong == "transport" else "tcp")
            except mk.ArgumentError as refusal:
                print(refusal, flush=True)
    """
    (zero, code), (one, other) = run_ranks(program, 2)
    assert (code, other) == (0, 0), zero + one
    first, second = zero.splitlines()
    assert first.startswith("rank 1 refused its call of mk.init: MKERNEL_SECRET has 5 characters")
    assert second.startswith("rank 1 refused its call of mk.init: transport must be 'auto', ")
    assert [line.startswith("MKERNEL_SECRET") for line in one.splitlines()] == [True, False]


def test_ranks_with_another_secret_are_named():
    program = """
        import os
        os.environ["MKERNEL_SECRET"] = "a secret of rank " + os.environ["RANK"]
        import mkernel as mk
        from support.patience import WAIT
        try:
            mk.init(timeout=WAIT)
        except mk.MKernelError as refusal:
            print("refused:", refusal, flush=True)
        import torch
        torch.distributed.barrier()
    """
    (zero, _), (one, _) = run_ranks(program, 2)
    assert "rank 1 has another MKERNEL_SECRET than rank 0" in zero, zero
    assert "rank 0 has another MKERNEL_SECRET than rank 1" in one, one
