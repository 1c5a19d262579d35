"""What needs no sshd: addresses, what ssh's own words mean, which Python is taken, and the wheel."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path

import pytest

import distruntime as dr
from distruntime.launching.ssh_address import SshAddress
from distruntime.launching.ssh_connection import explained
from distruntime.launching.ssh_probe import best, interpreters, lacking, script
from distruntime.launching.ssh_setup import long_step
from distruntime.launching.wheel import VERSION, requirements, wheel
from distruntime.version import __version__

# -- addresses -------------------------------------------------------------------------------------


def test_what_an_address_says() -> None:
    plain = SshAddress.parse("ssh://GPUbox")
    assert (plain.user, plain.host, plain.port, plain.options) == ("", "GPUbox", 0, {})
    assert plain.command == "ssh GPUbox"
    full = SshAddress.parse("ssh://me@gpu-1.lab:2222/?devices=cuda:0,cuda:1&max_memory=50%25&setup=auto")
    assert (full.destination, full.port, full.shown) == ("me@gpu-1.lab", 2222, "ssh://me@gpu-1.lab:2222")
    assert full.options == {"devices": "cuda:0,cuda:1", "max_memory": "50%", "setup": "auto"}
    assert full.command == "ssh -p 2222 me@gpu-1.lab"
    assert SshAddress.parse("ssh://[fe80::1]:22").host == "fe80::1"


def test_an_address_that_is_proposed_keeps_the_other_options() -> None:
    assert SshAddress.parse("ssh://gpubox").changed("setup", "auto") == "ssh://gpubox?setup=auto"
    text = "ssh://gpubox?python=~/old/python&devices=cuda:0,cuda:1&max_memory=50%25"
    proposed = SshAddress.parse(text).changed("setup", "auto")
    assert proposed == "ssh://gpubox?setup=auto&devices=cuda:0,cuda:1&max_memory=50%25"
    assert SshAddress.parse(proposed).options["max_memory"] == "50%"
    said = str(lacking(SshAddress.parse("ssh://gpubox?simulate_cuda=2"), None))
    assert said.endswith("or name one: ssh://gpubox?python=/path/to/python&simulate_cuda=2")


@pytest.mark.parametrize(
    "line, told",
    [
        (
            "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (887.9 MB)",
            "torch-2.13.0 (887.9 MB)",
        ),
        ("Downloading https://host/nvidia_cublas-13.0-py3-none.whl (1.2 GB)", "nvidia_cublas-13.0 (1.2 GB)"),
        (" Downloading nvidia-cudnn-cu13 (350.1MiB)", "nvidia-cudnn-cu13 (350.1 MB)"),
        ("Downloading numpy-2.4.6-cp311-cp311-linux_x86_64.whl (16.9 MB)", "numpy-2.4.6 (16.9 MB)"),
        ("  Downloading tqdm-4.70.1-py3-none-any.whl (80 kB)", ""),
        ("Downloading sympy-1.14.0-py3-none-any.whl (6.3 MB)", ""),
        ("Collecting numpy", ""),
    ],
)
def test_a_download_that_takes_long_is_told(line: str, told: str) -> None:
    assert long_step(line) == (f"downloading {told}" if told else "")


def test_an_installation_of_many_packages_is_told() -> None:
    assert long_step("Installing collected packages: mpmath, tqdm, torch") == "installing 3 packages"
    assert long_step("Installing collected packages: distruntime") == ""


@pytest.mark.parametrize(
    "address, text",
    [
        ("ssh://", "'' is no host"),
        ("ssh://-oProxyCommand=x", "is no host"),
        ("ssh://gpubox:99999", "Port out of range"),
        ("ssh://gpubox:0", "0 is no port"),
        ("ssh://-l@gpubox", "'-l' is no user"),
        ("ssh://me:secret@gpubox", r"ssh://me:\.\.\.@gpubox.*a password.*ssh-copy-id"),
        ("ssh://gpubox/tmp", "'/tmp' behind the host means nothing"),
        ("ssh://gpubox?gpus=1", "there is no option 'gpus'. There are address, devices, max_memory, python"),
        ("ssh://gpubox?devices=cpu&devices=cuda:0", "'devices' twice"),
        ("ssh://gpubox?devices=", "its option 'devices' is empty. It says the devices"),
        ("ssh://gpubox?setup=yes", "there is setup=auto alone"),
        ("ssh://gpubox?threads=many", "threads=many is no number"),
        ("ssh://gpubox?devices", "are no options"),
    ],
)
def test_an_address_that_cannot_be_is_refused(address: str, text: str) -> None:
    dr.shutdown()
    with pytest.raises(dr.errors.ConfigurationError, match=text) as caught:
        dr.init_master_worker(workers=[address])
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
    assert caught.traceback[-1].path == Path(__file__)


def test_a_launcher_and_no_key_are_refused() -> None:
    dr.shutdown()
    with pytest.raises(dr.errors.ConfigurationError, match="insecure=True does not go with"):
        dr.init_master_worker(workers=["ssh://gpubox"], insecure=True)


# -- what ssh says ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said, text",
    [
        (
            "ssh: Could not resolve hostname gpubox: Name or service not known",
            "ssh knows no host 'gpubox': Could not resolve hostname gpubox",
        ),
        (
            "No ED25519 host key is known for gpubox and you have requested strict checking.\n"
            "Host key verification failed.",
            "not known here. Run `ssh -p 2222 gpubox` once by hand",
        ),
        (
            "@@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n@@@@\nHost key verification failed.",
            r"has changed .*`ssh-keygen -R \[gpubox\]:2222`",
        ),
        (
            "gpubox: Permission denied (publickey).",
            r"ssh was not let in \(gpubox: Permission denied \(publickey\)\).*`ssh-copy-id -p 2222 gpubox`",
        ),
        (
            "ssh: connect to host gpubox port 22: Connection refused",
            "nobody accepts ssh there.*Is sshd running",
        ),
        ("ssh: connect to host gpubox port 22: Connection timed out", "does not answer.*a VPN, or ProxyJump"),
        (
            "/home/me/.ssh/config: line 3: Bad configuration option: foo",
            "does not accept its own configuration",
        ),
        ("@ WARNING: UNPROTECTED PRIVATE KEY FILE! @\nbad permissions", "chmod 600 FILE"),
        ("mux_client_forward: forwarding request failed: x", "AllowTcpForwarding yes"),
        (
            "Something new",
            r"ssh has ended \(exit code 255\); its last line: Something new. Try by hand: ssh -p",
        ),
        ("", r"ssh has ended \(exit code 255\), and said nothing. Try by hand: ssh -p 2222 gpubox"),
    ],
)
def test_what_ssh_says_becomes_one_line_with_what_to_do(said: str, text: str) -> None:
    error = explained(SshAddress.parse("ssh://gpubox:2222?threads=1"), said, 255)
    assert isinstance(error, dr.errors.ConnectionFailed) and "\n" not in str(error)
    assert str(error).startswith("ssh://gpubox:2222: ")
    with pytest.raises(dr.errors.ConnectionFailed, match=text):
        raise error


# -- what is there ---------------------------------------------------------------------------------


def _line(executable: str, version: list[int], **versions: str) -> str:
    return json.dumps({"executable": executable, "version": version, **versions})


def test_the_python_with_the_most_is_taken() -> None:
    lines = [
        "{ this is no JSON",
        _line("/old", [3, 8, 1], torch="2.13.0"),
        _line("/bare", [3, 12, 0]),
        _line("/torch", [3, 11, 0], torch="2.13.0+cpu", site="/site"),
        _line("/all", [3, 11, 0], torch="2.13.0", distruntime=__version__, distruntime_worker="?"),
        "gpus 2",
    ]
    found, gpus = interpreters(lines)
    assert gpus == 2
    chosen = best(found)
    assert chosen is not None and chosen.executable == "/all" and chosen.is_complete
    without = best(found[:-1])
    assert without is not None and (without.executable, without.site) == ("/torch", "/site")
    assert "has torch and no distruntime" in str(lacking(SshAddress.parse("ssh://gpubox"), without))
    assert best([]) is None


def test_a_home_in_a_path_is_the_other_machines() -> None:
    assert '"$HOME/venv/bin/python"' in script(SshAddress.parse("ssh://gpubox?python=~/venv/bin/python"))
    assert "'a python'" in script(SshAddress.parse("ssh://gpubox?python=a+python"))


def test_the_wheel_has_both_packages_and_says_what_they_need() -> None:
    name, data = wheel()
    assert name == f"distruntime-{__version__}-py3-none-any.whl" and __version__ == VERSION
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"distruntime-{__version__}.dist-info/METADATA").decode()
        record = archive.read(f"distruntime-{__version__}.dist-info/RECORD").decode()
    assert {"distruntime/__init__.py", "distruntime_worker/cli.py", "distruntime/launching/wheel.py"} <= names
    assert not any("__pycache__" in one for one in names)
    assert any(one.startswith("torch>=") for one in requirements())
    assert all(f"Requires-Dist: {one}" in metadata for one in requirements())
    assert {line.partition(",")[0] for line in record.splitlines()} == names
    assert sys.version_info >= (3, 10)
