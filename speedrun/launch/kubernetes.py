"""A Job of Kubernetes, or a JobSet of several pods that find each other by name."""

from typing import Any

import yaml

from speedrun.launch import shell
from speedrun.launch.job import PORT, Job

SHARED = "/shared"  #: where the claim is mounted: `data` and `out` lie below it
STAGE = "/stage/speedrun"  #: on the node's own disk, and gone with the pod
_LEAVE_S = 120  #: from SIGTERM to SIGKILL: for the end of a record, and to copy it
_MEET_S = 1800  #: pods pull their images and copy their shards at their own pace
_NODE = "node"  #: name of the replicated job


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stay texts of several lines."""


def _as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _as_block)


def dumped(title: list[str], value: dict[str, Any]) -> str:
    """YAML for people, with comments before it."""
    body = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return "\n".join([*title, body])


def text(job: Job) -> str:
    """The manifest."""
    title = shell.title(job, "kubernetes", "Submit it with: kubectl create -f FILE")
    metadata = {"name": job.name} | ({"namespace": job.namespace} if job.namespace else {})
    spec = _job(job)
    if job.nodes == 1:
        return dumped(title, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec})
    job_set = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name},  # a headless service
        "failurePolicy": {"maxRestarts": 0},  # a run that was begun again is another run
        "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": spec}}],
    }
    return dumped(
        title,
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": job_set},
    )


def _job(job: Job) -> dict[str, Any]:
    """One pod on each node. None is started a second time: a run that was begun again is another run."""
    spec: dict[str, Any] = {"backoffLimit": 0, "activeDeadlineSeconds": job.time_s}
    if job.nodes > 1:
        spec |= {"parallelism": job.nodes, "completions": job.nodes, "completionMode": "Indexed"}
    return spec | {"template": {"spec": _pod(job)}}


def _pod(job: Job) -> dict[str, Any]:
    volumes = {
        "stage": ("/stage", {"emptyDir": {}}),
        "memory": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),  # NCCL wants more than the usual 64 MiB
        "shared": (SHARED, {"persistentVolumeClaim": {"claimName": job.claim}}),
    }
    container: dict[str, Any] = {
        "name": "speedrun",
        "image": job.image,
        "command": ["bash", "-c", _script(job)],
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
    }
    if job.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _LEAVE_S,
        # A new claim belongs to root, and the image's user is 1000.
        "securityContext": {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [container],
        "volumes": [{"name": name, **kind} for name, (_, kind) in volumes.items()],
    }


def _script(job: Job) -> str:
    words = job.words
    if job.nodes > 1:  # which one a pod is, Kubernetes says in $JOB_COMPLETION_INDEX
        first = f"{job.name}-{_NODE}-0-0.{job.name}:{PORT}"
        words += ("--coordinator", first, "--processes", str(job.nodes), "--meet-within", str(_MEET_S))
    return (
        "set -euo pipefail\n"
        + shell.asked(job, words)
        + "record=$stage/$name\n"
        + shell.functions(job)
        + shell.keep()
        + shell.WORK
    )
