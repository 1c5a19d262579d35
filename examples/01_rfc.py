"""The example of PyTorch's RFC 241 (2016), which proposed a master-worker mode, with its places checked.

    $ python examples/01_rfc.py
    x       node 0  device -1  (20, 20)
    y       node 0  device -1  (20, 20)
    z       node 0  device -1  (20, 20)
    cuda_x  node 0  device  0  (20, 20)
    a       node 1  device  1  (10,)
    cuda_y  node 0  device  0  (20, 20)
    q       node 0  device  0  (20, 20)
    sum of q: 1624.97

Two workers run on this machine and offer two GPUs each. The GPUs are simulated: their tensors are really in
the CPU's memory, and placed as on a cluster.
"""

import torch

import distruntime as dr

with dr.init_master_worker(backend="zmq", simulate_cuda=2):
    torch.manual_seed(0)
    x = dr.factories.FloatTensor(20, 20).fill_(
        4
    )  # nothing said: node 0, and the CPU (device -1), as a tensor class of that name promises
    y = torch.randn(20, 20).dist_send()  # a local tensor, sent to the current node
    z = x + y
    assert (z.get_node(), z.get_device()) == (0, -1)

    cuda_x = x.cuda()  # a GPU of the node that x lives on
    assert (cuda_x.get_node(), cuda_x.get_device()) == (0, 0)

    with dr.node(1):
        a = dr.factories.FloatTensor(10, device=1)
        assert (a.get_node(), a.get_device()) == (1, 1)

        cuda_y = y.cuda()  # the context is for new tensors: y stays on its node
        assert (cuda_y.get_node(), cuda_y.get_device()) == (0, 0)

        q = cuda_x + cuda_y  # and operations run where their operands are
        assert (q.get_node(), q.get_device()) == (0, 0)

    # Until here nothing waited for a worker. Copies to the master are the sync points.
    assert torch.equal(q.cpu(), z.cpu())

    for name, tensor in {"x": x, "y": y, "z": z, "cuda_x": cuda_x, "a": a, "cuda_y": cuda_y, "q": q}.items():
        print(f"{name:6}  node {tensor.get_node()}  device {tensor.get_device():2}  {tuple(tensor.shape)}")
    print(f"sum of q: {q.sum():.2f}")
