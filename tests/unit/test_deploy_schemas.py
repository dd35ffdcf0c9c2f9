"""The manifests of deploy/kubernetes against the schemas of Kubernetes (kubernetes-validate) and of
JobSet (the models of Kubeflow Trainer, which are generated from JobSet's API)."""

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pydantic
import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
_VERSIONS = ("1.31", "1.34", kubernetes_validate.latest_version())
"""The oldest version that the manifest names, the newest one, and one between them."""


def _load(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def _jobs(jobset: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the Jobs that the controller of JobSet makes."""
    return [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": one["name"]}}
        | {"spec": one["template"]["spec"]}
        for one in jobset["spec"]["replicatedJobs"]
    ]


def _validate_jobset(jobset: dict[str, Any]) -> None:
    """Raise ValueError if a JobSet, apart from its Jobs, does not fit its schema, or has fields
    that the schema lacks."""
    own = copy.deepcopy(jobset)
    for one in own["spec"]["replicatedJobs"]:
        one["template"] = {}
    known = JobsetV1alpha2JobSet.model_validate(own).model_dump(by_alias=True, exclude_unset=True)
    if known != own:
        raise ValueError(f"unknown fields: {own} is read as {known}")


@pytest.mark.parametrize("version", _VERSIONS)
def test_the_manifests_fit_the_schemas_of_kubernetes(version: str) -> None:
    for one in (_load("network_policy.yaml"), *_jobs(_load("jobset.yaml"))):
        kubernetes_validate.validate(one, version, strict=True)


def test_the_jobset_fits_its_schema() -> None:
    _validate_jobset(_load("jobset.yaml"))


def test_mistakes_are_found() -> None:
    jobset = _load("jobset.yaml")
    misspelled = copy.deepcopy(jobset)
    misspelled["spec"]["network"] = {"enableDNSHostname": True}
    wrong_type = copy.deepcopy(jobset)
    wrong_type["spec"]["replicatedJobs"][0]["replicas"] = "one"
    for one in (misspelled, wrong_type):
        with pytest.raises((ValueError, pydantic.ValidationError)):
            _validate_jobset(one)
    job = _jobs(jobset)[1]
    job["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(job, "1.31", strict=True)
