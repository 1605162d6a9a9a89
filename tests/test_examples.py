"""Every example runs in the simulator, and says what it should."""

import sys
from pathlib import Path

import pytest
import torch
from support import forked_processes

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SAYS = {
    "01_all_gather_matmul": [
        *(f"Group(rank {rank} of 4, node {rank // 2} of 2 x 2, cpu): (256, 96), largest error" for rank in range(4)),
        "the network reads it directly",  # the plan for rows in the symmetric heap
    ],
    "02_matmul_reduce_scatter": [
        *(f"Group(rank {rank} of 4, node {rank // 2} of 2 x 2, cpu): (32, 96) and (128, 96)" for rank in range(4)),
        "partials travel as bfloat16",
    ],
    "03_ring_attention": [
        *(
            f"Group(rank {rank} of 4, node {rank // 2} of 2 x 2, cpu): (1, 4, 64, 64), largest error"
            for rank in range(4)
        ),
        "ring_attention: triton kernel",
        "the whole sequence again: (1, 4, 256, 64)",
    ],
    "04_moe": [
        *(f"Group(rank {rank} of 4, node {rank // 2} of 2 x 2, cpu): " for rank in range(4)),
        "whose capacity is 1",
        "capacity 72 rows for 2 experts",
    ],
    "05_tensor_parallel_mlp": [
        f"Group(rank {rank} of 4, node {rank // 2} of 2 x 2, cpu): (32, 64)" for rank in range(4)
    ],
    "07_train_llama": [
        f"Group(rank {rank} of 4, node {rank // 2} of 2 x 2, cpu): loss 5.0930 -> 4.5032 in 2 steps"
        for rank in range(4)
    ],
    "09_train_moe": [
        f"Group(rank {rank} of 4, node {rank // 2} of 2 x 2, cpu): loss 4.7736 -> 4.8163 in 2 steps"
        for rank in range(4)
    ],
}
NEED_A_GPU = {"08_cuda_graphs": "gpu/test_graphs_gpu.py"}
ELSEWHERE = {"all_gather_matmul": "cluster/test_torchrun.py", "06_processes_reduce": "cluster/test_torchrun.py"}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.thorough if "train" in path.stem else ())
        for path in EXAMPLES
        if path.stem in SAYS
    ],
)
def test_example(path):
    output = forked_processes.run_python([str(path), "cpu"])
    for expected in SAYS[path.stem]:
        assert expected in output


@pytest.mark.parametrize("name", list(ELSEWHERE))
def test_what_needs_several_processes_says_how_to_start_them(name):
    path = Path(__file__).parent.parent / f"examples/{name}.py"
    says = f"this needs 2, 4, ... processes: torchrun --nproc-per-node 4 {path}\n"
    assert forked_processes.run_python([str(path)], expected=2) == says
    assert says in forked_processes.run_ranks(path, 1)[0][0]


@pytest.mark.parametrize("name", list(NEED_A_GPU))
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_says_so(name):
    path = Path(__file__).parent.parent / f"examples/{name}.py"
    assert "need a GPU" in forked_processes.run_python([str(path)], expected=2)


@pytest.mark.thorough
def test_the_same_under_torchrun():
    path = Path(__file__).parent.parent / "examples/all_gather_matmul.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(path)]
    output = forked_processes.run(command, expected=1)
    assert f"this needs 2, 4, ... processes: torchrun --nproc-per-node 4 {path}\n" in output


TRAINING = Path(__file__).parent.parent / "examples/07_train_llama.py"


def assert_trained(output, ranks, nodes=1, steps=20, losses="5.0930 -> 2.3494"):
    """The program itself compares the loss of each step with that of the plain model."""
    for rank in range(ranks):
        here = f"Group(rank {rank} of {ranks}, node {rank * nodes // ranks} of {nodes} x {ranks // nodes}, cpu)"
        assert f"{here}: loss {losses} in {steps} steps" in output


def test_training_in_one_node_of_the_simulator():
    output = forked_processes.run_python([str(TRAINING), "cpu", "--nodes", "1"])
    assert_trained(output, 2, steps=2, losses="5.0930 -> 4.5032")


def train(ranks, *arguments):
    """What ranks print that are processes."""
    results = forked_processes.run_ranks(TRAINING, ranks, store="apart", arguments=arguments)
    assert [code for _, code in results] == [0] * ranks, results
    return "".join(output for output, _ in results)


@pytest.mark.thorough
def test_training_in_processes():
    assert_trained(train(2), 2)


@pytest.mark.thorough
def test_training_in_one_process():
    assert_trained(forked_processes.run_python([str(TRAINING)]), 1)


@pytest.mark.thorough
def test_training_under_torchrun():
    output = forked_processes.torchrun(TRAINING, 2, arguments=["--steps", "2"])
    assert_trained(output, 2, steps=2, losses="5.0930 -> 4.5032")


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["TensorWise", "RowWise", "BlockWise"])
def test_training_in_fp8(recipe):
    output = train(2, "--fp8", recipe, "--steps", "3")
    assert "in 3 steps, relative difference" in output


@pytest.mark.thorough
def test_training_in_bf16():
    """Four processes of one node, as below those of two. Few steps: there may be more processes than cores."""
    assert train(4, "--bf16", "--steps", "5").count("in 5 steps, relative difference") == 4


@pytest.mark.thorough
def test_training_over_the_network():
    output = train(4, "--gpus-per-node", "2", "--steps", "2")
    assert_trained(output, 4, nodes=2, steps=2, losses="5.0930 -> 4.5032")


MIXTURE = Path(__file__).parent.parent / "examples/09_train_moe.py"


@pytest.mark.thorough
def test_training_a_mixture_of_experts_in_one_node_of_the_simulator():
    output = forked_processes.run_python([str(MIXTURE), "cpu", "--nodes", "1", "--steps", "1"])
    assert_trained(output, 2, steps=1, losses="4.7736 -> 4.7736")


@pytest.mark.thorough
def test_training_a_mixture_of_experts_under_torchrun():
    output = forked_processes.torchrun(MIXTURE, 2, arguments=["--steps", "2"])
    assert_trained(output, 2, steps=2, losses="4.7736 -> 4.8163")


def test_examples_are_numbered_and_all_are_tested():
    assert {path.stem for path in EXAMPLES} == set(SAYS) | set(ELSEWHERE) | set(NEED_A_GPU)
    numbers = [
        int(path.stem[:2]) for path in EXAMPLES if path.stem != "all_gather_matmul"
    ]  # the plain one for torchrun
    assert numbers == list(range(1, len(numbers) + 1))
    for name, test in (ELSEWHERE | NEED_A_GPU).items():
        assert name in (Path(__file__).parent / test).read_text()
