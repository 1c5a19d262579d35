"""A session at the prompt, as `python -m distruntime repl --simulate-cuda 1` would have it.

Running this file replays it and checks it.

    $ python examples/03_explore.py
    29 inputs replayed, 29 answered as written

Two workers on this machine, each with a CPU and a GPU (simulated). Torch's spellings go to the GPU of node 0:

>>> session = dr.init_master_worker(simulate_cuda=1)
>>> seed = torch.manual_seed(0)
>>> x = torch.randn(2, 3, device="remote")
>>> x
tensor([[ 1.5410, -0.2934, -2.1788],
        [ 0.5684, -1.0845, -1.3986]], device='remote:0' (node 0 cuda:0))

The worker drew what this process would have drawn. Views are views, and numbers are read like any tensor's:

>>> x[:, 0].fill_(7)
tensor([7., 7.], device='remote:0' (node 0 cuda:0))
>>> x
tensor([[ 7.0000, -0.2934, -2.1788],
        [ 7.0000, -1.0845, -1.3986]], device='remote:0' (node 0 cuda:0))
>>> f"{x.sum():.3f}", x[1, 0].item(), x.shape
('9.045', 7.0, torch.Size([2, 3]))

Autograd is torch's own:

>>> w = torch.ones(3, 1, device="remote", requires_grad=True)
>>> (x @ w).square().sum().backward()
>>> w.grad
tensor([[126.6253],
        [-12.4545],
        [-32.3647]], device='remote:0' (node 0 cuda:0))

An operation runs where its operands are, so they must be in one place. `on` chooses where new tensors go:

>>> with dr.on(1):
...     y = torch.eye(3, device="remote")
>>> y.place
dr.place(1, 'cuda:0')
>>> x @ y
Traceback (most recent call last):
    ...
distruntime.errors.PlacementError: aten.mm.default: operands live on different nodes: \
`self` on node 0 cuda:0 (...), `mat2` on node 1 ...
  move one of them, for instance mat2.to(self.device)      (copies 36 B from node 1 cuda:0 to node 0 cuda:0)
>>> torch.equal(x @ y.to(x.device), x)
True
>>> x.cuda(5)
Traceback (most recent call last):
    ...
distruntime.errors.PlacementError: node 0 (...) has no device 'cuda:5': it has cpu, cuda:0

Nothing waits until a value is read. A mistake that only the worker can see surfaces there. It has its own
class, and names the line that issued it:

>>> row = x[torch.tensor([9], device="remote")]
>>> total = row.sum() + 1
>>> total.item()
Traceback (most recent call last):
    ...
IndexError: index 9 is out of bounds for dimension 0 with size 2
  aten::index.Tensor on node 0 (...), operands: (2, 3) float32, (1,) int64
  issued at <...>:1   row = x[torch.tensor([9], device="remote")]
>>> total
<remote scalar float32, 4 B, node 0 cuda:0: poisoned: index 9 is out of bounds \
for dimension 0 with size 2 (issued at ...)>

Several values come in one go, and can come later:

>>> coming = dr.fetch_async({"x": x, "w": w})
>>> sorted(coming.result())
['w', 'x']
>>> dr.fetch(x[0])
tensor([ 7.0000, -0.2934, -2.1788])

What cannot work says what can:

>>> x.numpy()
Traceback (most recent call last):
    ...
TypeError: can't convert a tensor on node 0 cuda:0 to numpy; fetch it first: x.detach().cpu().numpy(), \
or x.numpy(force=True)

And a training loop that should not wait can be held to that:

>>> dr.profiler.set_sync_debug_mode("error")
>>> if x.mean() > 0:
...     print("positive")
Traceback (most recent call last):
    ...
distruntime.errors.UsageError: item blocks until a worker answers
  at <...>:1   if x.mean() > 0:
  `await dr.fetch_async(x)` does not block
>>> dr.profiler.set_sync_debug_mode("default")
>>> dr.shutdown()
>>> x
<remote 2x3 float32, 24 B, node 0 cuda:0: its session has ended>
>>> x + 1
Traceback (most recent call last):
    ...
distruntime.errors.SessionClosed: this session has ended (it was shut down); its tensors are gone. \
Call init_master_worker for a new one
"""

import doctest
import sys

import torch  # noqa: F401  (the transcript uses it)

import distruntime as dr  # noqa: F401

if __name__ == "__main__":
    failed, tried = doctest.testmod(optionflags=doctest.ELLIPSIS)
    print(f"{tried} inputs replayed, {tried - failed} answered as written")
    sys.exit(failed > 0)
