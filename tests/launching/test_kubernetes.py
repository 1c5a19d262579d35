"""The manifests of a launch: what Kubernetes is to make of it, checked against its schema."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import distruntime as dr
from distruntime.launching.kubernetes import Pods, manifests, text
from distruntime.wire.keys import KeyPair
from launches import Launch


def pods(**fields: Any) -> Pods:
    made = {"name": "train", "image": "registry/train:1", "workers": 4, "gpus": 2}
    made |= {"namespace": "", "restarts": 3, "arguments": ["--threads=2", "train.py", "--lr", "0.1"]}
    return Pods(**{**made, **fields})


def test_the_first_pod_runs_the_script_and_the_others_are_workers(tmp_path: Path) -> None:
    secret, service, job = json.loads(text(manifests(pods())))["items"]
    assert [made["kind"] for made in (secret, service, job)] == ["Secret", "Service", "Job"]
    assert {made["metadata"]["name"] for made in (secret, service, job)} == {"train"}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 5, 5)
    # Pods of an indexed Job have their number behind the Job's name, and the Service gives them names.
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    (container,) = pod["containers"]
    command = container["command"][-1]
    assert command.endswith(
        "exec distruntime launch --mpi -n 5 --master tcp://train-0.train:29400 --key /tmp/key "
        "--threads=2 train.py --lr 0.1"
    )
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    key = tmp_path / "key"
    key.write_bytes(base64.b64decode(secret["data"]["key"]))
    key.chmod(0o600)
    assert KeyPair.load(key)


def test_the_manifests_follow_the_schema() -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("pip install kubernetes-validate brings the schema")
    library = importlib.import_module("kubernetes_validate")
    for made in (*manifests(pods()), *manifests(pods(namespace="lab", gpus=0))):
        library.validate(made, library.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["Train", "a_b", "1a", "a" * 53, "a-", ""])
def test_a_name_that_kubernetes_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(dr.errors.ConfigurationError, match="expected small letters"):
        manifests(pods(name=name))


def test_the_command_prints_them(tmp_path: Path) -> None:
    options = "--kubernetes --dry-run --image registry/train:1 -n 2 --namespace lab -m package.train".split()
    with Launch(tmp_path, *options) as launch:
        assert launch.ended() == 0, launch.said()
        items = json.loads(launch.out)["items"]
    assert {made["metadata"]["namespace"] for made in items} == {"lab"}
    command = items[2]["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    assert command.endswith("--max-restarts=3 -m package.train")
    with Launch(tmp_path, "--kubernetes", "train.py") as launch:
        assert launch.ended() == 2
        assert "give --dry-run and --image too" in launch.err
