"""The manifests are what Kubernetes accepts, and the pods they make know who they are."""

from typing import Any

import pytest

from paceline.errors import SpecError
from paceline.launch import identify
from paceline.launch.kubernetes import PodJob, manifests, to_yaml

validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
yaml = pytest.importorskip("yaml", reason="needs PyYAML")

VERSIONS = ("1.27", "1.33")
JOB = PodJob(
    image="example.org/paceline:1",
    command=("paceline", "train", "--model", 'a "quoted" name: #1'),
    workers=3,
    servers=1,
    memory="4Gi",
    gpus=1,
)


def check(document: dict[str, Any]) -> None:
    for version in VERSIONS:
        validate.validate(document, version, strict=True)


def pod_environment(document: dict[str, Any], index: int) -> dict[str, str]:
    """What Kubernetes would put into the pod of that index."""
    container = document["template"]["spec"]["containers"][0]
    known = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    return {**known, "JOB_COMPLETION_INDEX": str(index), "PACELINE_ADDRESS": "127.0.0.1"}


def test_job_service_and_secret_are_valid() -> None:
    documents = list(yaml.safe_load_all(to_yaml(manifests(JOB, key="k"))))
    assert [document["kind"] for document in documents] == ["Secret", "Service", "Job"]
    for document in documents:
        check(document)
    assert documents == manifests(JOB, key="k")


def test_the_schema_refuses_what_is_wrong() -> None:
    broken = manifests(JOB)[-1]
    broken["spec"]["completionMod"] = "Indexed"
    with pytest.raises(validate.ValidationError):
        check(broken)


def test_jobset_holds_a_valid_job() -> None:
    jobset = yaml.safe_load_all(to_yaml(manifests(JOB, jobset=True)))
    secret, document = jobset
    check(secret)
    assert (document["apiVersion"], document["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = document["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    check({**job, **replicated["template"]})
    first = pod_environment(replicated["template"]["spec"], 0)
    assert first["PACELINE_COORDINATOR"].startswith("paceline-members-0-0.paceline:")


def test_pods_are_told_apart_and_find_worker_0_through_the_service() -> None:
    secret, service, job = manifests(JOB)
    names = [identify(pod_environment(job["spec"], index)).name for index in range(4)]
    assert names == ["worker0", "worker1", "worker2", "server0"]
    identity = identify(pod_environment(job["spec"], 3))
    pod_of_worker_0 = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert identity.coordinator.partition(":")[0] == pod_of_worker_0
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert len(secret["stringData"]["key"]) >= 32


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"name": "Big_Name"}, "cannot name a job"),
        ({"workers": 0}, "0 workers"),
        ({"command": ()}, "no command"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"image": "i", "command": ("true",), "workers": 1, **changes}
    with pytest.raises(SpecError, match=match):
        PodJob(**given)
