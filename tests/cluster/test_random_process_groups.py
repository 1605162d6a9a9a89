"""Random programs on random groups of processes, made from process groups and meshes too: see
tests/support/random_programs.py."""

import json
from pathlib import Path

import pytest
from support.forked_processes import run_ranks
from support.random_programs import compare_bits, seeds

TESTS = Path(__file__).parents[1]
STEPS = 10

PROGRAM = """
    import json, random, sys
    sys.path.insert(0, {tests!r})
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    import mkernel as mk
    from support.patience import WAIT
    from support.random_programs import Program

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    def nodes_of(rng, ranks):
        '''Of how many ranks a node is: several nodes talk over TCP.'''
        return rng.choice([None, *(count for count in range(1, ranks + 1) if ranks % count == 0)])

    def make(process_group, members, gpus_per_node):
        if rank not in members:
            return None
        group = mk.init(process_group, timeout=WAIT, gpus_per_node=gpus_per_node if len(members) > 1 else None)
        assert (group.size, group.rank) == (len(members), members.index(rank)), (group, members)
        return group

    def make_more(rng):
        '''(members, group, how) of groups that are made of process groups; all ranks take part.'''
        if rng.random() < 0.5:
            members = sorted(rng.sample(range(size), rng.randint(1, size)))
            gpus_per_node = nodes_of(rng, len(members))
            local = rng.random() < 0.5  # only its members make it
            made = None
            if rank in members or not local:
                made = dist.new_group(members, use_local_synchronization=local)
            yield members, make(made, members, gpus_per_node), f"mk.init of new_group, nodes of {{gpus_per_node}}"
            return
        shape = rng.choice([(n, size // n) for n in range(1, size + 1) if size % n == 0])
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        ranks = torch.arange(size).view(shape)
        for dim in rng.sample(["dp", "tp"], 2):
            rows = (ranks.t() if dim == "dp" else ranks).tolist()
            gpus_per_node = nodes_of(rng, len(rows[0]))
            mine = make(mesh[dim].get_group(), next(row for row in rows if rank in row), gpus_per_node)
            for row in rows:
                yield row, mine if rank in row else None, f"mk.init of {{dim}} of a mesh {{shape}}"

    rng = random.Random({seed})
    whole = mk.init(timeout=WAIT, gpus_per_node=nodes_of(rng, size))
    bits = Program(whole, {seed}, {steps}, make_more).run()
    print("bits", json.dumps(bits))
    dist.barrier()
"""


def run_program(seed, ranks=4, steps=STEPS):
    program = PROGRAM.format(tests=str(TESTS), seed=seed, steps=steps)
    bits = []
    for output, code in run_ranks(program, ranks):
        assert code == 0, output
        bits.append(json.loads(output.rpartition("bits ")[2].splitlines()[0]))
    compare_bits(bits)


@pytest.mark.parametrize("seed", seeds([3, 4]))
@pytest.mark.thorough
def test_random_programs(seed):
    run_program(seed)
