"""Predictions: how long a call takes on a cluster of 1 to 1024 nodes that need not exist: `mkernel plan`.

A prediction has three parts.

- The plan is the one that a call would take there (cluster.py). The operator's own code makes it, for a group that does
  not exist, of which it sees only the sizes.
- The operator's model (model.py in its package, named in its registry entry) carries out that plan step by step, as its
  kernels do: the order in which each CTA takes its tiles, what it waits for, what it pushes and posts. The orders come
  from the source of the kernels, which evaluate.py runs on arrays. Tests compare them with traces of the simulator.
- The engine (engine.py) has the resources on which the steps take time: CTAs and warps, NVLink, the proxy, the network
  card, switches. Their rates are in a machine's file (machine.py, machines/).

The model simulates a single rank. All ranks do the same relative to their own number: when the rank sends something to
the rank `n` after it, the rank `n` before it sends the same to it. All lanes take their n-th step together, as arrays.
So 1024 nodes of 8 GPUs take seconds.

The model leaves out the caches and memory of a GPU, except as measured rates; collisions in the network (the schedules
send to one node after the other, and all ranks to different ones); and differences between ranks, except those that a
mask makes: then some ranks are simulated one by one, and the slowest one counts.

validation.py compares the model with measurements and with the times that mKernel, the CUDA library, publishes. For the
latter, the model carries out mKernel's own schedules (peer.py here, and in an operator's package). docs/scale.md has
the results.
"""
