"""`dr.config`: torch's settings of the workers, set and read from here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..errors import ConfigurationError, ProtocolError, without_our_frames
from ..log.node import Node
from ..session.session import active_session
from ..session.spelling import living
from ..session.tables import table_html, table_text
from ..tensors.worker_functions import issue_function, read_function

_PRECISIONS = ("highest", "high", "medium")


@dataclass(frozen=True)
class Settings:
    """The torch settings of one node, by the names that `dr.config` takes.

    `float32_matmul_precision` is None where TF32 of matmul was set apart from it: torch has no name for that.
    """

    num_threads: int
    flush_denormal: bool
    float32_matmul_precision: str | None
    cuda_matmul_allow_tf32: bool
    cuda_matmul_allow_fp16_reduced_precision_reduction: bool
    cuda_matmul_allow_bf16_reduced_precision_reduction: bool
    cudnn_allow_tf32: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    mkldnn_enabled: bool
    fill_uninitialized_memory: bool
    use_deterministic_algorithms: bool
    warn_only: bool


class NodeSettings(dict[int, Settings]):
    """The settings of nodes by their numbers; prints as a table.

    Nodes with equal settings share a column.
    """

    def _rows(self) -> list[list[str]]:
        alike: dict[Settings, list[int]] = {}
        for node, settings in self.items():
            alike.setdefault(settings, []).append(node)
        heads = [f"node{'s' if len(nodes) > 1 else ''} {_numbers(nodes)}" for nodes in alike.values()]
        return [
            ["setting", *heads],
            *([one.name, *(str(getattr(held, one.name)) for held in alike)] for one in fields(Settings)),
        ]

    def __repr__(self) -> str:
        return table_text(self._rows())

    def _repr_html_(self) -> str:
        return table_html(self._rows())


def _numbers(nodes: Sequence[int]) -> str:
    """Return "0, 1, 2", and no more than eight numbers of many."""
    return ", ".join(map(str, nodes[:8])) + (f", … {len(nodes)} in all" if len(nodes) > 8 else "")


@without_our_frames
def config(
    *,
    node: int | None = None,
    num_threads: int | None = None,
    flush_denormal: bool | None = None,
    float32_matmul_precision: str | None = None,
    cuda_matmul_allow_tf32: bool | None = None,
    cuda_matmul_allow_fp16_reduced_precision_reduction: bool | None = None,
    cuda_matmul_allow_bf16_reduced_precision_reduction: bool | None = None,
    cudnn_allow_tf32: bool | None = None,
    cudnn_benchmark: bool | None = None,
    cudnn_deterministic: bool | None = None,
    mkldnn_enabled: bool | None = None,
    fill_uninitialized_memory: bool | None = None,
    use_deterministic_algorithms: bool | None = None,
    warn_only: bool | None = None,
) -> NodeSettings | None:
    """Set torch's settings on a node, or on all; with no setting named, return those of each, by its number.

    What is returned is a dict of `Settings`, and prints as a table.

    Setting returns at once: operations issued afterwards see it, those before do not. What a worker refuses
    is raised by the next `synchronize`. Reading blocks until the nodes have run everything issued so far.
    Settings are the whole worker's, whatever its device, and last as long as the session. They are torch's
    own, under torch's names without what stands before them:

    Args:
        node: a node's number; all nodes if left out, but for lost ones.
        num_threads: threads that one operation on a CPU may use, as `torch.set_num_threads`; at most 16 per
            core.
        flush_denormal: as `torch.set_flush_denormal`.
        float32_matmul_precision: "highest", "high" or "medium", as `torch.set_float32_matmul_precision`; sets
            TF32 of matmul as well.
        cuda_matmul_allow_tf32: as `torch.backends.cuda.matmul.allow_tf32`; so on for the other names with
            `cuda_matmul`.
        cudnn_allow_tf32: as `torch.backends.cudnn.allow_tf32`; so on for `benchmark` and `deterministic`.
        mkldnn_enabled: as `torch.backends.mkldnn.enabled`.
        fill_uninitialized_memory: as `torch.utils.deterministic.fill_uninitialized_memory`.
        use_deterministic_algorithms: as the function of that name. On a GPU some of them need
            CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment that the worker is started with; torch's error
            says so.
        warn_only: goes with it: warn in the worker's log instead of failing; False if left out.

    Raises:
        ConfigurationError: a value that cannot be. PlacementError: there is no such node. NodeFailed: it is
            lost.
    """
    wanted: dict[str, object] = {
        name: value for name, value in locals().items() if name != "node" and value is not None
    }
    _check(wanted)
    session = active_session()
    there = living(session, node)
    if not wanted:
        return NodeSettings({n.index: _settings(n) for n in there})
    # Two threads that set something at a time come to every node in one order.
    with session.lock:
        for n in there:
            issue_function(n, "config", (), wanted)
    return None


def _settings(node: Node) -> Settings:
    rows = read_function(node, "settings")
    if not isinstance(rows, list):
        raise ProtocolError(f"{node} describes its settings as {rows!r:.80}: this is no list")
    try:
        return Settings(**{name: value for _, name, value in rows[1:]})
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{node} describes its settings as {rows!r:.80}: {error}") from None


def _check(wanted: dict[str, object]) -> None:
    for name, value in wanted.items():
        if name == "num_threads":
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"num_threads is a number of threads, at least 1, got {value!r}")
        elif name == "float32_matmul_precision":
            if value not in _PRECISIONS:
                raise ConfigurationError(
                    f"float32_matmul_precision is one of {', '.join(map(repr, _PRECISIONS))}, got {value!r}"
                )
        elif type(value) is not bool:
            raise ConfigurationError(f"{name} is True or False, got {value!r}")
    if "float32_matmul_precision" in wanted and "cuda_matmul_allow_tf32" in wanted:
        raise ConfigurationError(
            'float32_matmul_precision sets cuda_matmul_allow_tf32 too, True below "highest": give one of the '
            "two"
        )
    if "warn_only" in wanted and "use_deterministic_algorithms" not in wanted:
        raise ConfigurationError(
            "warn_only goes with use_deterministic_algorithms: give both, as "
            "torch.use_deterministic_algorithms takes them"
        )
