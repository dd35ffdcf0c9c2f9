"""The pods of deploy/kubernetes/jobset.yaml, without Kubernetes: each has a network, a host name,
process ids and shared memory of its own, the environment of the manifest and of JobSet, and names
of pods as its DNS has them."""

import copy
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.harness import launch
from tests.harness.ranks import REPOSITORY
from tests.resilience.network.namespaces import Network
from tests.resilience.scheduled_run import train_together

_MANIFEST = REPOSITORY / "deploy/kubernetes/jobset.yaml"
_COORDINATOR = "coordinator"
_SECRET = "0123456789abcdef" * 2
_FILLED_IN = re.compile(r"--config configs/llama3_8b\.toml \\\n +--job\.dump_folder /data/run ")
"""The arguments for train.py in the script of a pod."""
_IMAGE = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""The environment of deploy/Dockerfile."""
_OWN_MOUNTS = 'mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"'
_WAIT_S = 240.0

Pod = tuple[int, int]
"""The number of a replica, and of a pod in it."""


def filled_in(num_replicas: int, num_nodes: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the manifest with what a user fills in."""
    manifest = yaml.safe_load(_MANIFEST.read_text())
    replica = _replicated_job(manifest, "replica")
    replica["replicas"] = num_replicas
    spec = replica["template"]["spec"]
    spec["parallelism"] = spec["completions"] = num_nodes
    container = _container(replica)
    values = {"NNODES": num_nodes, "GPUS": 1, "REPLICAS": num_replicas}
    for variable in container["env"]:
        if variable["name"] in values:
            variable["value"] = str(values[variable["name"]])
    (script,) = container["args"]
    given = " \\\n".join(arguments)
    container["args"] = [_FILLED_IN.sub(lambda _: f"{given} ", script)]
    assert container["args"] != [script]
    return manifest


def _replicated_job(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    (job,) = (one for one in manifest["spec"]["replicatedJobs"] if one["name"] == name)
    return job


def _container(replicated_job: dict[str, Any]) -> dict[str, Any]:
    (container,) = replicated_job["template"]["spec"]["template"]["spec"]["containers"]
    return container


@contextmanager
def pods(
    folder: Path, num_replicas: int, num_nodes: int, arguments: Sequence[str]
) -> Iterator["Pods"]:
    """Start the coordinator and all pods of the replicas. On exit, all are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [(replica, node) for replica in range(num_replicas) for node in range(num_nodes)]
    manifest = filled_in(num_replicas, num_nodes, arguments)
    with Network([_COORDINATOR, *map(_host, names)]) as network:
        started = Pods(folder, network, manifest, names)
        try:
            started.start_all()
            yield started
        finally:
            started.remove()


class Pods:
    """The pods of a JobSet."""

    def __init__(
        self, folder: Path, network: Network, manifest: dict[str, Any], names: Sequence[Pod]
    ) -> None:
        self.folder, self.names = folder, names
        self.run = folder / "run"
        self._network, self._manifest = network, manifest
        self._jobset = manifest["metadata"]["name"]
        self._all: list[subprocess.Popen[bytes]] = []
        self.running: dict[Pod, subprocess.Popen[bytes]] = {}

    def start_all(self) -> None:
        """Start the coordinator and all pods."""
        lines = [self._dns_entry(_COORDINATOR, f"{self._jobset}-{_COORDINATOR}-0-0")]
        lines += [self._dns_entry(_host(pod), self._hostname(pod)) for pod in self.names]
        for name in (_COORDINATOR, *map(_host, self.names)):
            self._network.set_hosts(name, "".join(["127.0.0.1 localhost\n", *lines]))
        coordinator = _container(_replicated_job(self._manifest, _COORDINATOR))
        self._start(_COORDINATOR, f"{self._jobset}-{_COORDINATOR}-0-0", coordinator, 0, 0)
        for pod in self.names:
            self.start(pod)

    def start(self, pod: Pod) -> None:
        """Start a pod, as its Job does, also in place of one that is gone."""
        container = _container(_replicated_job(self._manifest, "replica"))
        hostname = self._hostname(pod)
        self.running[pod] = self._start(_host(pod), hostname, container, *pod)

    def _start(
        self, host: str, hostname: str, container: dict[str, Any], job_index: int, pod_index: int
    ) -> subprocess.Popen[bytes]:
        labels = {
            "jobset.sigs.k8s.io/jobset-name": self._jobset,
            "jobset.sigs.k8s.io/job-index": str(job_index),
        }
        environment = {
            **_IMAGE,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOSTNAME": hostname,
            "JOB_COMPLETION_INDEX": str(pod_index),
            # Tests ask no hub, and take half a second per step.
            "HF_HUB_OFFLINE": "1",
            "RANK_FAULTS": "slow=0.5",
            **_environment(container, labels),
        }
        # The command has the process id 1, with which all processes of the pod end.
        isolated = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        isolated += ["sh", "-c", _OWN_MOUNTS, "sh"]
        command = [*container["command"], *container.get("args", [])]
        with self.log(host).open("ab") as log:
            process = subprocess.Popen(
                [*self._network.command(host, hostname), *isolated, *command],
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._all.append(process)
        return process

    def _hostname(self, pod: Pod) -> str:
        replica, node = pod
        return f"{self._jobset}-replica-{replica}-{node}"

    def _dns_entry(self, host: str, hostname: str) -> str:
        return f"{self._network.address(host)} {hostname}.{self._jobset} {hostname}\n"

    def send(self, pod: Pod, number: signal.Signals) -> None:
        """Send a signal to the process 1 of a pod: SIGTERM as Kubernetes deletes it, SIGKILL as if
        its node is lost."""
        (first,) = psutil.Process(self.running[pod].pid).children()
        first.send_signal(number)

    def wait(self, holds: Callable[[], object]) -> None:
        """Block until the condition holds."""
        deadline = time.monotonic() + _WAIT_S
        while not holds():
            assert time.monotonic() < deadline, self.report()
            time.sleep(0.2)

    def wait_for_step(self, step: int, num_replicas: int) -> None:
        """Block until this many replicas take steps together, from `step` on."""
        self.wait(lambda: train_together(self.run, num_replicas, step))

    def status(self, pod: Pod) -> int:
        """Block until a pod has ended, and return its exit status."""
        self.wait(lambda: self.running[pod].poll() is not None)
        return self.running[pod].wait()

    def log(self, host: str) -> Path:
        return self.folder / f"{host}.log"

    def report(self) -> str:
        """Return the ends of all logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2500:]}" for log in logs)

    def remove(self) -> None:
        """Kill all pods."""
        for process in self._all:
            with suppress(psutil.NoSuchProcess):
                own = psutil.Process(process.pid)
                launch.kill([*own.children(recursive=True), own])
            process.wait()


def _host(pod: Pod) -> str:
    """Return the name of a pod's host."""
    return "r{}-{}".format(*pod)


def _environment(container: dict[str, Any], labels: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a container in a pod with these labels."""
    values = {}
    for variable in copy.deepcopy(container["env"]):
        name, source = variable.pop("name"), variable.pop("valueFrom", {})
        if "fieldRef" in source:
            path = re.fullmatch(r"metadata\.labels\['(.*)'\]", source["fieldRef"]["fieldPath"])
            assert path
            values[name] = labels[path[1]]
        elif "secretKeyRef" in source:
            values[name] = _SECRET
        else:
            values[name] = variable["value"]
    return values
