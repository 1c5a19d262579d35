"""The manifests of a launch on Kubernetes, checked against its schema and its command line."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shlex
from typing import Any

import pytest
import yaml

from distruntime.command_options import add_launch
from processes import ROOT


def manifests() -> list[Any]:
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def test_the_first_pod_runs_the_script_and_the_others_are_workers() -> None:
    service, job = manifests()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 5
    # Pods of an indexed Job have their number behind the Job's name, and the Service gives them names.
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    words = shlex.split(pod["containers"][0]["command"][-1].split("exec distruntime ")[1])
    parser = argparse.ArgumentParser()
    add_launch(parser.add_subparsers())
    options = parser.parse_args(words)
    assert options.mpi and options.count == 5 and options.words == ["train.py"]
    assert options.master == f"tcp://{job['metadata']['name']}-0.{service['metadata']['name']}:29400"


def test_the_manifests_follow_the_schema() -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("pip install kubernetes-validate brings the schema")
    library = importlib.import_module("kubernetes_validate")
    for made in manifests():
        library.validate(made, library.latest_version(), strict=True)
