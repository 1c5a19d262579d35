"""Remote PyTorch tensors: one process drives many workers that own the real ones. See README.md.

Importing changes nothing but what is printed behind some errors, and offers `torch.compile` one more backend.
`init_master_worker` opens a session. The names that most programs need are here, and the others in parts,
such as `dr.distributed`: docs/names.md lists them.
"""

from __future__ import annotations

import typing

from . import first_use as _first_use
from . import hints as _hints
from . import interpreter as _interpreter
from .compiled import name as _name
from .version import __version__ as __version__

# A public name is imported when it is first used. The import of torch takes two seconds, and so
# `python -m distruntime --help` can do without it. A worker needs the wire and the errors alone, and imports
# nothing else of this package. `first_use.lend` reads the names off this block. Each part says its own names
# in a block like this one, or imports them.
if typing.TYPE_CHECKING:
    from . import data, distributed, errors, mesh, parallel, profiler, types, workers
    from .backend.random import manual_seed
    from .checkpoint.load import load
    from .checkpoint.save import save
    from .checkpoint.training import run_with_restarts
    from .cluster.as_cuda import takeover
    from .cluster.connect import detach, init_master_worker, is_initialized, shutdown
    from .cluster.memory import memory
    from .cluster.nodes import nodes
    from .cluster.settings import config
    from .cluster.workers import restart
    from .collectives import functional, primitives
    from .errors import DistruntimeError
    from .layers import nn

    # IPython calls it: `%load_ext distruntime`.
    from .magics import load_ipython_extension as load_ipython_extension
    from .mesh import lines
    from .mesh.mesh import init_device_mesh
    from .mesh.sharding import from_shards, shards
    from .programs.program import program
    from .publishing.publish import lookup, names, publish, unpublish
    from .python.remote import remote
    from .python.remote_module import RemoteModule
    from .python.spmd import spmd
    from .session.placing import device, node, on, place, set_place
    from .streams import nvtx
    from .streams.cancel import cancel
    from .streams.stream import (
        Event,
        Stream,
        current_stream,
        default_stream,
        set_implicit_waits,
        stream,
        synchronize,
    )
    from .tensors import factories
    from .tensors.fetch import fetch, fetch_async
    from .tensors.tensor import DistributedTensor
    from .timeline.trace import trace
    from .timeline.why_slow import why_slow


# `import distruntime.functional` is for users, as `torch.nn.functional` is. Most folders are rooms of the
# house, and for nobody else.
_MODULES = {
    "factories": "tensors.factories",
    "functional": "collectives.functional",
    "lines": "mesh.lines",
    "nn": "layers.nn",
    "nvtx": "streams.nvtx",
    "primitives": "collectives.primitives",
}
_interpreter.check_interpreter()
_first_use.publish(__name__, _MODULES)
# `testing` imports this package, so the block above cannot name it.
_first_use.lend(__name__, modules=(*_MODULES, "testing"), moved="distruntime.old_names")
_hints.install()
_name.install_name()

__all__ = [
    "DistributedTensor",
    "DistruntimeError",
    "Event",
    "RemoteModule",
    "Stream",
    "cancel",
    "config",
    "current_stream",
    "data",
    "default_stream",
    "detach",
    "device",
    "distributed",
    "errors",
    "factories",
    "fetch",
    "fetch_async",
    "from_shards",
    "functional",
    "init_device_mesh",
    "init_master_worker",
    "is_initialized",
    "lines",
    "load",
    "lookup",
    "manual_seed",
    "memory",
    "mesh",
    "names",
    "nn",
    "node",
    "nodes",
    "nvtx",
    "on",
    "parallel",
    "place",
    "primitives",
    "profiler",
    "program",
    "publish",
    "remote",
    "restart",
    "run_with_restarts",
    "save",
    "set_implicit_waits",
    "set_place",
    "shards",
    "shutdown",
    "spmd",
    "stream",
    "synchronize",
    "takeover",
    "testing",
    "trace",
    "types",
    "unpublish",
    "why_slow",
    "workers",
]
