"""Predictions: what a call takes on clusters that need not be there, of 1 to 1024 nodes: `mkernel plan`.

A prediction has three parts.

- The plan is the one that a call would take there (cluster.py): the operator's own code makes it, for a group that does
  not exist, of which it sees the sizes.
- The operator's model (model.py in its package, named in its registry entry) carries out that plan step by step, as its
  kernels do: which CTA takes which tile after which, what it waits for, what it pushes and posts. The orders come from
  the source of the kernels, which evaluate.py runs on arrays. Tests compare them with traces of the simulator.
- The engine (engine.py) has the resources on which the steps take time: CTAs and warps, NVLink, the proxy, the network
  card, switches. Their rates are in a machine's file (machine.py, machines/).

What is simulated is one rank. The ranks of a cluster do the same relative to themselves, so what it sends to a rank so
many behind it also tells when the same arrives from the rank so many before it. All lanes take their n-th step
together, as arrays. So 1024 nodes of 8 GPUs take seconds.

What is left out: the caches and memory of a GPU, except as measured rates; collisions in the network (the schedules
send to one node after the other, and all ranks to different ones); differences between ranks, apart from those that a
mask makes: then some ranks are simulated one by one, and the slowest one counts.

validation.py compares the model with what was measured, and with what mKernel, the CUDA library, publishes: of that the
model carries out its own schedules (peer.py here, and in an operator's package). docs/scale.md has what it says.
"""
