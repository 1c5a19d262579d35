"""Why a process that has begun a session computes no gradients on a GPU of its own."""

from __future__ import annotations

ONE_ACCELERATOR = (
    "torch's backward pass knows one kind of accelerator in a process (pytorch/pytorch#161129). From the"
    ' first session on that is "remote", so gradients on a GPU here fail. Train on this GPU through a'
    " worker (init_master_worker() starts one), or in a process without a session"
)
