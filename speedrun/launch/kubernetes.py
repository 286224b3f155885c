"""A Job of Kubernetes, or a JobSet of several pods that find each other by name."""

import json

from speedrun.launch import shell
from speedrun.launch.job import PORT, Job

SHARED = "/shared"  #: where the claim is mounted: `data` and `out` lie below it
STAGE = "/stage/speedrun"  #: on the node's own disk, and gone with the pod


def text(job: Job) -> str:
    """Return the manifest."""
    # The index of a pod is in $JOB_COMPLETION_INDEX.
    words = (*job.words, *shell.meeting(job, f"{job.name}-node-0-0.{job.name}:{PORT}"))
    spec = shell.render(
        "kubernetes_spec.yaml",
        time_s=job.time_s,
        if_several=job.nodes > 1,
        nodes=job.nodes,
        image=json.dumps(job.image),
        script=shell.pod(shell.node(job, words, "$stage/$name")),
        if_gpus=job.gpus > 0,
        gpus=job.gpus,
        claim=json.dumps(job.claim),
    )
    return shell.render(
        "kubernetes_job.yaml" if job.nodes == 1 else "kubernetes_jobset.yaml",
        title=shell.title(job, "kubernetes", "Submit it with: kubectl create -f FILE"),
        name=json.dumps(job.name),
        namespace=job.namespace and json.dumps(job.namespace),
        spec=spec,
    )
