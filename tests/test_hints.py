"""The first line of a new user: what is said behind an error that torch or Python words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from distruntime.hints import hint

NONE = 'torch knows the device "remote" while a session is open, and none was begun: call distruntime.init_m'


def said(*command: str, typed: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *command], input=typed, capture_output=True, text=True, timeout=100, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("prompt", [["-c"], ["-m", "IPython", "--colors=NoColor", "--no-banner", "-c"]])
def test_a_tensor_before_a_session_is_told_what_to_call(prompt: list[str]) -> None:
    text = said(*prompt, "import torch, distruntime as dr\ntorch.ones(2, device='remote')")
    assert "at start of device string: remote" in text and NONE in text.splitlines()[-1]


def test_a_script_without_a_tensor_has_no_line_of_ours() -> None:
    text = said("-c", "import distruntime\n1 / 0")
    assert text.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_a_mistyped_device_gets_a_suggestion() -> None:
    error = RuntimeError("Expected one of cpu, cuda device type at start of device string: remot")
    assert hint(error) == "distruntime: did you mean device=\"remote\"? Got 'remot'"
    assert hint(RuntimeError("Expected one of cpu device type at start of device string: gpu")) == ""
    assert hint(None) == hint(ValueError("remote")) == ""


def test_our_own_prompt_suggests_too() -> None:
    """Its shell begins after its session, and so after the import."""
    text = said("-m", "distruntime", "repl", typed="torch.ones(2, device='remot')\n")
    assert "distruntime: did you mean device=\"remote\"? Got 'remot'" in text.splitlines()


def test_gradients_on_a_gpu_of_this_process_are_explained() -> None:
    asserted = RuntimeError("opt_ready_stream && opt_parent_stream INTERNAL ASSERT FAILED at engine.cpp:1084")
    assert "through a worker" in hint(asserted)


def test_ipython_suggests_an_attribute_of_a_remote_tensor(session: object) -> None:
    import torch

    x = torch.ones(2, device="remote")
    with pytest.raises(AttributeError) as raised:
        x.too  # noqa: B018
    assert hint(raised.value, ipython=True) == "distruntime: did you mean 'to'?"
    # Python's own prompt says so by itself.
    assert hint(raised.value) == ""
    with pytest.raises(AttributeError) as raised:
        torch.ones(2).too  # noqa: B018
    assert hint(raised.value, ipython=True) == ""
