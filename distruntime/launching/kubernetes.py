"""Manifests for Kubernetes: a Job whose first pod runs the script and whose others are its workers."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import ConfigurationError
from ..wire.keys import KeyPair

# The pods meet at this port of the first one.
PORT = 29400
# An object of the manifests may hold these.
Value: TypeAlias = "Mapping[str, Value] | Sequence[Value] | str | int | bool"
Object = Mapping[str, Value]


@dataclass(frozen=True)
class Pods:
    """What the Job is to have.

    Attributes:
        name: what all objects are called.
        image: the image of the pods. It has Python, torch, distruntime and the script.
        workers: so many workers there are, each in a pod.
        gpus: so many GPUs each of them has.
        namespace: "" is the one that kubectl is set to.
        restarts: so often pods are started again that have failed.
        arguments: of `distruntime launch`, the script and its arguments.
    """

    name: str
    image: str
    workers: int
    gpus: int
    namespace: str
    restarts: int
    arguments: Sequence[str]


def manifests(pods: Pods) -> list[Object]:
    """Return the objects: a Secret with a new key, a Service that names the pods, and the Job.

    Raises:
        ConfigurationError: a name that Kubernetes does not take.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", pods.name):
        raise ConfigurationError(
            f"got the name {pods.name!r}, expected small letters, digits and '-', at most 52 of them, with a "
            "letter first: --name digits"
        )
    labels: Object = {"app.kubernetes.io/name": "distruntime", "app.kubernetes.io/instance": pods.name}
    return [_secret(pods, labels), _service(pods, labels), _job(pods, labels)]


def _about(pods: Pods, labels: Object) -> Object:
    about: Object = {"name": pods.name, "labels": labels}
    return {**about, "namespace": pods.namespace} if pods.namespace else about


def _secret(pods: Pods, labels: Object) -> Object:
    key = base64.b64encode(KeyPair.generate().text().encode("ascii")).decode("ascii")
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _about(pods, labels),
        "type": "Opaque",
        "data": {"key": key},
    }


def _service(pods: Pods, labels: Object) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _about(pods, labels),
        "spec": {
            # A Service without an address gives each pod a name.
            "clusterIP": "None",
            # Workers look the first pod up before its script listens.
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": "distruntime", "port": PORT}],
        },
    }


def _job(pods: Pods, labels: Object) -> Object:
    count = pods.workers + 1
    launch = [
        *("distruntime", "launch", "--mpi", "-n", str(count)),
        *("--master", f"tcp://{pods.name}-0.{pods.name}:{PORT}", "--key", "/tmp/key"),
        *pods.arguments,
    ]
    # A key is taken only from a file that its owner alone can read. A pod's user may own no file of a Secret.
    command = f"install -m 600 /etc/distruntime/key /tmp/key && exec {shlex.join(launch)}"
    resources: Object = {"limits": {"nvidia.com/gpu": pods.gpus}} if pods.gpus else {}
    container: Object = {
        "name": "distruntime",
        "image": pods.image,
        "command": ["/bin/sh", "-c", command],
        "ports": [{"containerPort": PORT}],
        "resources": resources,
        "volumeMounts": [
            {"name": "key", "mountPath": "/etc/distruntime", "readOnly": True},
            # Workers of one pod exchange tensors through shared memory.
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    pod: Object = {
        "subdomain": pods.name,
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "key", "secret": {"secretName": pods.name, "defaultMode": 0o444}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _about(pods, labels),
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": pods.restarts,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def text(objects: Sequence[Object]) -> str:
    """Return manifests as a list in JSON, which `kubectl apply -f -` takes."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}, indent=2)
