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
    from . import data as data
    from . import distributed as distributed
    from . import errors as errors
    from . import mesh as mesh
    from . import parallel as parallel
    from . import profiler as profiler
    from . import types as types
    from . import workers as workers
    from .backend.random import manual_seed as manual_seed
    from .checkpoint.load import load as load
    from .checkpoint.save import save as save
    from .checkpoint.training import run_with_restarts as run_with_restarts
    from .cluster.as_cuda import takeover as takeover
    from .cluster.connect import detach as detach
    from .cluster.connect import init_master_worker as init_master_worker
    from .cluster.connect import is_initialized as is_initialized
    from .cluster.connect import shutdown as shutdown
    from .cluster.memory import memory as memory
    from .cluster.nodes import nodes as nodes
    from .cluster.settings import config as config
    from .cluster.workers import restart as restart
    from .collectives import functional as functional
    from .collectives import primitives as primitives
    from .errors import DistruntimeError as DistruntimeError
    from .layers import nn as nn

    # IPython calls it: `%load_ext distruntime`.
    from .magics import load_ipython_extension as load_ipython_extension
    from .mesh import lines as lines
    from .mesh.mesh import init_device_mesh as init_device_mesh
    from .mesh.sharding import from_shards as from_shards
    from .mesh.sharding import shards as shards
    from .programs.program import program as program
    from .publishing.publish import lookup as lookup
    from .publishing.publish import names as names
    from .publishing.publish import publish as publish
    from .publishing.publish import unpublish as unpublish
    from .python.remote import remote as remote
    from .python.remote_module import RemoteModule as RemoteModule
    from .python.spmd import spmd as spmd
    from .session.spelling import device as device
    from .session.spelling import node as node
    from .session.spelling import on as on
    from .session.spelling import place as place
    from .session.spelling import set_place as set_place
    from .streams import nvtx as nvtx
    from .streams.cancel import cancel as cancel
    from .streams.order import set_implicit_waits as set_implicit_waits
    from .streams.stream import Event as Event
    from .streams.stream import Stream as Stream
    from .streams.stream import current_stream as current_stream
    from .streams.stream import default_stream as default_stream
    from .streams.stream import stream as stream
    from .streams.synchronize import synchronize as synchronize
    from .tensors import factories as factories
    from .tensors.fetch import fetch as fetch
    from .tensors.fetch import fetch_async as fetch_async
    from .tensors.tensor import DistributedTensor as DistributedTensor
    from .timeline.trace import trace as trace
    from .timeline.why_slow import why_slow as why_slow


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
_first_use.lend(
    __name__, modules=(*_MODULES, "testing"), moved="distruntime.old_names", hooks=("load_ipython_extension",)
)
_hints.install()
_name.install_name()
