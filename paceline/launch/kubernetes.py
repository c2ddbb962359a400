"""Members that are pods of an indexed Job, and the manifests that make them."""

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.errors import SpecError
from paceline.launch.identity import Identity, from_launcher, integer

PORT = 29400
"""A pod has its own network: no other process can hold this port there."""

Manifest = dict[str, Any]


MOST = 1_000_000
WORDS = {
    "image": r"[A-Za-z0-9][\w.:/@+-]*",
    "cores": r"(\d+(\.\d+)?|\d+m)",
    "memory": r"(\d+(\.\d+)?([KMGTP]i?|k)?)?",
    "shared_memory": r"\d+(\.\d+)?([KMGTP]i?|k)?",
}
FIXES = {
    "image": "write such as registry/paceline:1.0.",
    "cores": 'write "2" or "500m".',
    "memory": 'write "4Gi".',
    "shared_memory": 'write "1Gi".',
}


class PodJob(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the manifests."""

    image: str
    command: tuple[str, ...]
    """Command line of every member."""

    workers: int
    servers: int = 0
    name: str = "paceline"
    cores: str = "1"
    """Per member, as Kubernetes writes it: "2" or "500m"."""

    memory: str = ""
    gpus: int = 0
    shared_memory: str = "1Gi"
    """Size of /dev/shm; a container's own has 64 MiB, too small for an exchange."""

    def __post_init__(self) -> None:
        where = "paceline kubernetes"
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?", self.name):
            problem = f'"{self.name}" cannot name a job and its service.'
            fix = "use up to 53 lower-case letters, digits and dashes, a letter first."
            raise SpecError(where, problem, fix)
        if self.workers < 1 or self.servers < 0:
            problem = f"{self.workers} workers and {self.servers} servers."
            raise SpecError(where, problem, "ask for at least one worker.")
        if not 0 <= self.gpus <= MOST or self.workers + self.servers > MOST:
            problem = f"{self.workers + self.servers} members with {self.gpus} GPUs each."
            raise SpecError(where, problem, "ask for as many as there are.")
        for name, pattern in WORDS.items():
            if not re.fullmatch(pattern, getattr(self, name)):
                flag = f"--{name.replace('_', '-')}"
                problem = f"{getattr(self, name)!r} is not as Kubernetes writes it."
                raise SpecError(flag, problem, FIXES[name])
        if not self.command:
            fix = "write it after two dashes: `paceline kubernetes … -- paceline train …`."
            raise SpecError(where, "there is no command to run.", fix)


def manifests(job: PodJob, *, jobset: bool = False, key: str = "") -> list[Manifest]:
    """An indexed Job with a headless Service, or a JobSet (which brings its own); and the key."""
    key = key or secrets.token_hex(32)
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": job.name},
        "stringData": {"key": key},
    }
    return [secret, _jobset(job)] if jobset else [secret, _service(job), _job(job)]


def to_yaml(documents: list[Manifest]) -> str:
    """The documents as one YAML stream; scalars are written as JSON, which is YAML too."""
    return "---\n".join("\n".join(_yaml_lines(document)) + "\n" for document in documents)


def identify(environ: Mapping[str, str]) -> Identity | None:
    if "JOB_COMPLETION_INDEX" not in environ or "PACELINE_WORKERS" not in environ:
        return None
    members = integer(environ, "PACELINE_WORKERS") + integer(environ, "PACELINE_SERVERS", 0)
    if members > 1 and not environ.get("PACELINE_COORDINATOR"):
        fix = "start pods from the manifests that `paceline kubernetes` prints."
        raise SpecError("kubernetes", "PACELINE_COORDINATOR is not set.", fix)
    return from_launcher(
        environ,
        "kubernetes",
        index=integer(environ, "JOB_COMPLETION_INDEX"),
        members=members,
        local_index=0,
        local_members=1,  # a pod is a host of its own: its own address, its own shared memory
    )


def _service(job: PodJob) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",
            "selector": {"job-name": job.name},
            # Members look worker 0 up before it is ready.
            "publishNotReadyAddresses": True,
        },
    }


def _job(job: PodJob) -> Manifest:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": _job_spec(job, coordinator=f"{job.name}-0.{job.name}:{PORT}"),
    }


def _jobset(job: PodJob) -> Manifest:
    coordinator = f"{job.name}-members-0-0.{job.name}:{PORT}"
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "subdomain": job.name,
                "publishNotReadyAddresses": True,
            },
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {
                    "name": "members",
                    "replicas": 1,
                    "template": {"spec": _job_spec(job, coordinator, subdomain=False)},
                }
            ],
        },
    }


def _job_spec(job: PodJob, coordinator: str, *, subdomain: bool = True) -> Manifest:
    members = job.workers + job.servers
    pod: Manifest = {
        "restartPolicy": "Never",
        "containers": [_container(job, coordinator)],
        "volumes": [
            {
                "name": "shared-memory",
                "emptyDir": {"medium": "Memory", "sizeLimit": job.shared_memory},
            }
        ],
    }
    if subdomain:
        pod["subdomain"] = job.name
    return {
        "completions": members,
        "parallelism": members,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }


def _container(job: PodJob, coordinator: str) -> Manifest:
    resources: Manifest = {"cpu": job.cores}
    if job.memory:
        resources["memory"] = job.memory
    if job.gpus:
        resources["nvidia.com/gpu"] = str(job.gpus)
    key = {"secretKeyRef": {"name": job.name, "key": "key"}}
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    return {
        "name": "member",
        "image": job.image,
        "command": list(job.command),
        "env": [
            {"name": "PACELINE_WORKERS", "value": str(job.workers)},
            {"name": "PACELINE_SERVERS", "value": str(job.servers)},
            {"name": "PACELINE_COORDINATOR", "value": coordinator},
            {"name": "PACELINE_ADDRESS", "valueFrom": address},
            {"name": "PACELINE_KEY", "valueFrom": key},
        ],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }


def _yaml_lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        lines = []
        for key, item in value.items():
            inner = _yaml_lines(item)
            if isinstance(item, dict | list) and item:
                lines += [f"{key}:", *(f"  {line}" for line in inner)]
            else:
                lines.append(f"{key}: {inner[0]}")
        return lines
    if isinstance(value, list) and value:
        blocks = [_yaml_lines(item) for item in value]
        return [("- " if i == 0 else "  ") + line for b in blocks for i, line in enumerate(b)]
    return [json.dumps(value)]
