"""The machines that the suite must pass on: what each has, or lacks, and which tests that can touch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Condition(NamedTuple):
    """A machine, made of this one.

    In `environment`, `prepare` and `clone`, `{folder}` is a folder of the condition's own that every user may
    enter. Lines of `prepare` run before the tests, and in namespaces where the condition has some.
    """

    name: str
    what: str
    # Files and folders, and other words of pytest: this is what the condition can touch.
    tests: str
    environment: Mapping[str, str] = MappingProxyType({})
    # These variables are taken out, as the condition's own words must hold.
    without: tuple[str, ...] = ()
    # Programs that stand before python, such as `taskset -c 0`.
    prefix: str = ""
    # The letters of `unshare`: m for mounts, n for the network.
    namespaces: str = ""
    prepare: tuple[str, ...] = ()
    # The tests run in a clone there, and in a venv of that clone.
    clone: str = ""
    # The tests run as a user who owns the clone, and nothing else.
    nobody: bool = False
    # So many processes compute beside the tests.
    busy: int = 0
    # Flags of x86 processors, one of which the condition takes away. Without them it would change nothing.
    flags: tuple[str, ...] = ()


# Dtypes and autocast: which kernels there are depends on the processor. These are few, as `.ci/run` has them
# at each commit.
_DTYPES = (
    "tests/torch_db/test_autocast_lists.py tests/backend/test_autocast.py tests/tensors/test_factories.py "
    "tests/operators/test_default_dtype.py"
)
# Waits, deadlines and what is measured: these tests have a clock.
_CLOCKS = (
    "tests/wire/test_deadlines.py tests/wire/test_link.py tests/session/test_timeouts.py "
    "tests/session/test_interrupts.py tests/log/test_back_pressure.py tests/streams/test_cancel.py "
    "tests/timeline/test_why_slow.py tests/worker/test_timing.py tests/cluster/test_looking.py "
    "tests/collectives/test_group_failures.py"
)
# Files, folders, programs that are started, and what they print.
_PATHS = (
    "tests/cluster/test_launch.py tests/cluster/test_log_files.py tests/cluster/test_scratch.py "
    "tests/cluster/test_sessions.py tests/launching/test_launch.py tests/launching/test_job.py "
    "tests/launching/test_ssh_parts.py tests/wire/test_keys.py tests/wire/test_scratch.py "
    "tests/wire/test_shared_memory.py tests/worker/test_cli.py tests/worker/test_settings.py "
    "tests/worker/test_service.py tests/python/test_shipping.py "
    "tests/python/test_output.py tests/session/test_tracebacks.py tests/session/test_prompt.py "
    "tests/checkpoint/test_checkpoint.py tests/checkpoint/test_checkpoint_failures.py "
    "tests/publishing/test_signing.py tests/test_commands.py tests/test_hints.py tests/test_golden_errors.py "
    "tests/test_words.py tests/test_links.py tests/test_layering.py"
)
_SOCKETS = (
    "tests/cluster/test_addresses.py tests/cluster/test_connection.py tests/cluster/test_dial_in.py "
    "tests/wire/test_channel.py tests/wire/test_keys.py tests/collectives/test_data_channels.py "
    "tests/worker/test_metrics.py tests/worker/test_cli.py tests/hostile/test_strangers.py "
    "tests/launching/test_launch_hosts.py tests/launching/test_job.py"
)

CONDITIONS = (
    Condition(
        "old-processor",
        "torch's kernels for a processor without AVX",
        _DTYPES + " tests/torch_db/test_op_db.py",
        # Inductor's cache does not know this variable: it would give code with vectors, made without it.
        {"ATEN_CPU_CAPABILITY": "default", "TORCHINDUCTOR_CACHE_DIR": "{folder}/inductor"},
        flags=("avx2", "avx512f"),
    ),
    Condition(
        "onednn-avx2",
        "oneDNN without AVX-512",
        _DTYPES,
        {"ONEDNN_MAX_CPU_ISA": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2"},
        flags=("avx512f",),
    ),
    Condition(
        "onednn-sse41",
        "oneDNN without AVX",
        _DTYPES,
        {"ONEDNN_MAX_CPU_ISA": "SSE41", "DNNL_MAX_CPU_ISA": "SSE41"},
        flags=("avx", "avx2"),
    ),
    Condition("one-core", "one core", _CLOCKS, prefix="taskset -c {core}"),
    Condition("busy", "four processes that compute beside the tests", _CLOCKS, busy=4),
    Condition("user", "a user who is not root, and has no name", _PATHS, clone="{folder}/clone", nobody=True),
    Condition(
        "home",
        "a home that cannot be written",
        _PATHS,
        {"HOME": "{folder}/home"},
        ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"),
        namespaces="m",
        prepare=("mkdir {folder}/home", "mount -t tmpfs -o ro tmpfs {folder}/home"),
    ),
    Condition(
        "language",
        "LANG=C, and a time zone that is three quarters of an hour off",
        _PATHS,
        {"LANG": "C", "LC_ALL": "C", "TZ": "Asia/Kathmandu"},
        ("PYTHONUTF8", "PYTHONIOENCODING", "LANGUAGE"),
    ),
    Condition(
        "ascii",
        "a Python that reads and writes ASCII where nothing else is said",
        _PATHS,
        {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        ("PYTHONIOENCODING", "LANGUAGE"),
    ),
    Condition(
        "path",
        "a clone, its venv and a TMPDIR whose paths have blanks and letters that are not ASCII",
        _PATHS,
        {"TMPDIR": "{folder}/tmp ü"},
        prepare=("mkdir {folder}/'tmp ü'",),
        clone="{folder}/ein Pfad mit ä",
    ),
    Condition(
        "settings",
        "DISTRUNTIME_* variables that the user has set",
        _PATHS + " " + _SOCKETS + " tests/session/test_announce.py tests/test_environment_page.py",
        {
            "DISTRUNTIME_WORKERS": "tcp://127.0.0.1:9",
            "DISTRUNTIME_WORLD_SIZE": "7",
            "DISTRUNTIME_SESSION": "mine",
            "DISTRUNTIME_QUIET": "1",
            "DISTRUNTIME_KEY": "{folder}/no-key",
            "DISTRUNTIME_TRUSTED_KEYS": "{folder}/no-trusted-keys",
            "DISTRUNTIME_SIGNING_KEY": "{folder}/no-signing-key",
            "DISTRUNTIME_TIMEOUT": "0.5",
            "DISTRUNTIME_UNREACHABLE": "0.5",
            "DISTRUNTIME_GRACE": "0.5",
            "DISTRUNTIME_GROUP_TIMEOUT": "0.01",
            "DISTRUNTIME_WORKER_MAX_MEMORY": "1MB",
            "DISTRUNTIME_WORKER_LOG_FORMAT": "json",
        },
    ),
    Condition(
        "no-ipv6",
        "no IPv6, and one interface beside the loopback",
        _SOCKETS,
        namespaces="n",
        prepare=(
            "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6",
            "echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6",
            "ip link add eth0 type veth peer name far0",
            "ip addr add 10.78.0.2/24 dev eth0",
            "for device in lo far0 eth0; do ip link set $device up; done",
        ),
    ),
    Condition(
        "small-shm",
        "64 MiB of /dev/shm, as a container has",
        "tests/wire/test_shared_memory.py tests/collectives tests/python/test_data_loader.py "
        "tests/publishing/test_publish_shared.py tests/tensors/test_reading.py "
        "tests/backend/test_storages.py",
        namespaces="m",
        prepare=("mount -t tmpfs -o size=64m tmpfs /dev/shm",),
    ),
)
