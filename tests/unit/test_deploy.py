"""The files of deploy/: syntax, consistency of repeated values, and the restart logic of their
scripts, run with fakes of Slurm and of the processes that they start."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.slurm import SCRIPT, write_command, write_slurm_commands
from torchtitan_lite.cli.parsers import parser

ROOT = Path(__file__).parents[2]
JOBSET = ROOT / "deploy/kubernetes/jobset.yaml"
_PYTHON = """
echo "$*" >>calls
case "$*" in
*"torchtitan_lite coordinator"*) exec sleep 100 ;;
*departures*) cat >>departures ;;
*train.py*)
  [[ "$*" =~ replica_id\\ ([0-9]+) ]] && id=${BASH_REMATCH[1]}
  echo "$TORCHTITAN_LITE_TOKEN" >"token_$id"
  echo . >>"attempts_$id"
  line=$(sed -n "$(wc -l <"attempts_$id")p" "plan_$id")
  read -r seconds status <<<"$line"
  sleep "$seconds" & nap=$!
  trap 'kill $nap; echo "saved $id" >>saves; exit 143' TERM
  wait $nap
  exit "$status" ;;
esac
"""
"""A fake Python. Line k of plan_REPLICA has the duration in seconds and the exit status of attempt
k."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with fakes of Slurm's commands and of Python in bin/."""
    write_slurm_commands(tmp_path / "bin")
    write_command(tmp_path / "bin" / "python", _PYTHON)
    return tmp_path


def start(script: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHON": str(folder / "bin" / "python"),
        "SLURM_JOB_NODELIST": "localhost localhost localhost",
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_ID": "7",
        **variables,
    }
    return subprocess.Popen(
        script, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def attempts(folder: Path, replica: int) -> int:
    return len((folder / f"attempts_{replica}").read_text().splitlines())


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def test_slurm_counts_consecutive_restarts(site: Path) -> None:
    # Replica 1 restarts twice, but trains in between. Replica 2 fails twice in a row.
    plans = ["0.1 0", "0 1\n2 1\n0 0", "0 1\n0 1\n0 0"]
    for replica, plan in enumerate(plans):
        (site / f"plan_{replica}").write_text(plan + "\n")
    job = start(["bash", str(SCRIPT), "--config", "x.toml"], site, MAX_RESTARTS="1", HEALTHY_S="2")
    output, _ = job.communicate(timeout=60)
    # The run is finished when a replica is.
    assert job.returncode == 0, output
    assert [attempts(site, replica) for replica in range(3)] == [1, 3, 2], output
    assert "Replica 2 failed 2 times in a row and is given up" in output
    assert (
        sorted((site / "departures").read_text().split())
        == ["replica_00001"] * 2 + ["replica_00002"] * 2
    )
    logs = {path.name for path in (site / "job-7").iterdir()}
    assert {"coordinator.log", "replica_1-generation_2-node_0.log"} <= logs
    called = (site / "calls").read_text()
    assert "--config x.toml --fault_tolerance.enable true --fault_tolerance.replica_id 2" in called
    (command,) = re.findall(r"^-m torchtitan_lite (coordinator .*)$", called, re.MULTILINE)
    # "localhost" resolves to a loopback address, to which other nodes cannot connect.
    assert parser().parse_args(command.split()).bind == "[::]:29520"
    assert "listens on all interfaces; set COORDINATOR_BIND" in output


def test_slurm_fails_if_all_replicas_are_given_up(site: Path) -> None:
    for replica in range(3):
        (site / f"plan_{replica}").write_text("0 1\n")
    job = start(["bash", str(SCRIPT), "--config", "x.toml"], site, MAX_RESTARTS="0")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 1, output
    assert output.count("is given up") == 3


def test_slurm_binds_the_coordinator_to_the_given_address(site: Path) -> None:
    for replica in range(3):
        (site / f"plan_{replica}").write_text("0.1 0\n")
    job = start(["bash", str(SCRIPT), "--config", "x.toml"], site, COORDINATOR_BIND="10.0.0.1")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    called = (site / "calls").read_text()
    assert "-m torchtitan_lite coordinator --bind 10.0.0.1:29520 " in called
    assert "COORDINATOR_BIND" not in output


@pytest.mark.parametrize(
    ("number", "requeued"), [(signal.SIGTERM, []), (signal.SIGUSR1, ["7"])], ids=["stop", "limit"]
)
def test_slurm_waits_for_the_saves_and_requeues_at_the_time_limit(
    site: Path, number: signal.Signals, requeued: list[str]
) -> None:
    for replica in range(3):
        (site / f"plan_{replica}").write_text("100 0\n")
    job = start(["bash", str(SCRIPT), "--config", "x.toml"], site)
    for replica in range(3):
        wait_for(site / f"attempts_{replica}")
    time.sleep(0.3)
    job.send_signal(number)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert sorted((site / "saves").read_text().splitlines()) == ["saved 0", "saved 1", "saved 2"]
    assert not (site / "departures").exists()
    file = site / "bin" / "requeued"
    assert (file.read_text().split() if file.exists() else []) == requeued


def test_slurm_keeps_the_secret_in_a_file_of_the_user(site: Path) -> None:
    for replica in range(3):
        (site / f"plan_{replica}").write_text("100 0\n")
    job = start(["bash", str(SCRIPT), "--config", "x.toml"], site)
    for replica in range(3):
        wait_for(site / f"attempts_{replica}")
    file = site / "job-7" / "token"
    assert file.stat().st_mode & 0o777 == 0o600
    secret = file.read_text()
    assert len(secret) == 32
    # Coordinator and replicas have it, and nothing that Slurm sees.
    assert {(site / f"token_{replica}").read_text().strip() for replica in range(3)} == {secret}
    assert secret not in (site / "bin" / "srun.env").read_text()
    assert secret not in (site / "calls").read_text()
    job.terminate()
    output, _ = job.communicate(timeout=60)
    assert secret not in output
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "variables", "error"),
    [
        ([], {}, "No arguments for train.py"),
        (["--config", "x"], {"NODES_PER_REPLICA": "2"}, "3 nodes are not a multiple of"),
        (["--config", "x"], {"TORCHTITAN_LITE_TOKEN": "s" * 32}, "which Slurm stores. Unset it"),
    ],
)
def test_slurm_rejects_invalid_calls(
    site: Path, arguments: list[str], variables: dict[str, str], error: str
) -> None:
    job = start(["bash", str(SCRIPT), *arguments], site, **variables)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 2 and error in output


def test_slurm_does_not_log_into_a_missing_folder() -> None:
    (output,) = re.findall(r"^#SBATCH --output=(\S+)$", SCRIPT.read_text(), re.MULTILINE)
    assert "/" not in output


def jobset() -> dict[str, Any]:
    return yaml.safe_load(JOBSET.read_text())


def containers() -> dict[str, Any]:
    return {
        job["name"]: job["template"]["spec"]["template"]["spec"]["containers"][0]
        for job in jobset()["spec"]["replicatedJobs"]
    }


def test_jobset_repeats_its_numbers_consistently() -> None:
    (replica,) = (one for one in jobset()["spec"]["replicatedJobs"] if one["name"] == "replica")
    job = replica["template"]["spec"]
    train = containers()["replica"]
    variables = {one["name"]: one.get("value") for one in train["env"]}
    assert variables["REPLICAS"] == str(replica["replicas"])
    assert variables["NNODES"] == str(job["parallelism"]) == str(job["completions"])
    assert variables["GPUS"] == str(train["resources"]["limits"]["nvidia.com/gpu"])
    pod = job["template"]["spec"]
    # Kubernetes accepts a pod failure policy only with this restart policy.
    assert pod["restartPolicy"] == "Never"
    assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    fails, ignores = job["podFailurePolicy"]["rules"]
    assert fails["onExitCodes"]["containerName"] == train["name"]
    assert ignores["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    mounted = {one["name"] for one in train["volumeMounts"]}
    assert mounted == {one["name"] for one in pod["volumes"]}


def test_the_network_policy_selects_the_pods_of_the_jobset() -> None:
    policy = yaml.safe_load((JOBSET.parent / "network_policy.yaml").read_text())
    pods = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": jobset()["metadata"]["name"]}}
    assert policy["spec"]["podSelector"] == pods
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": pods}]}]


def test_jobset_coordinator_accepts_its_options() -> None:
    command = containers()["coordinator"]["command"]
    assert command[:3] == ["python", "-m", "torchtitan_lite"]
    inputs = parser().parse_args(command[3:])
    port = containers()["coordinator"]["ports"][0]["containerPort"]
    assert inputs.bind == f"[::]:{port}"
    train = {one["name"]: one.get("value") for one in containers()["replica"]["env"]}
    assert train["TORCHFT_LIGHTHOUSE"].endswith(f"-coordinator-0-0.torchtitan-lite:{port}")
    # Both ends of a departure need the same secret.
    for container in containers().values():
        (token,) = (one for one in container["env"] if one["name"] == "TORCHTITAN_LITE_TOKEN")
        assert token["valueFrom"]["secretKeyRef"] == {"name": "torchtitan-lite", "key": "token"}


def pod_script() -> list[str]:
    train = containers()["replica"]
    assert train["command"] == ["bash", "-c"] and len(train["args"]) == 1
    return [*train["command"], train["args"][0]]


def pod_variables(**own: str) -> dict[str, str]:
    train = containers()["replica"]
    fixed = {one["name"]: one["value"] for one in train["env"] if "value" in one}
    return {**fixed, "REPLICA": "1", "JOB_COMPLETION_INDEX": "0", **own}


def test_a_pod_counts_consecutive_restarts(site: Path) -> None:
    (site / "plan_1").write_text("0 1\n2 1\n0 0\n")
    variables = pod_variables(MAX_RESTARTS="1", HEALTHY_S="2")
    pod = start(pod_script(), site, **variables)
    output, _ = pod.communicate(timeout=60)
    assert pod.returncode == 0, output
    assert attempts(site, 1) == 3
    assert (site / "departures").read_text().split() == ["replica_00001"] * 2


def test_a_pod_fails_with_the_status_of_the_failure_policy(site: Path) -> None:
    (site / "plan_1").write_text("0 1\n0 1\n0 0\n")
    pod = start(pod_script(), site, **pod_variables(MAX_RESTARTS="1"))
    output, _ = pod.communicate(timeout=60)
    replica = jobset()["spec"]["replicatedJobs"][1]["template"]["spec"]
    assert [pod.returncode] == replica["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert "is given up" in output


def test_a_deleted_pod_saves_and_does_not_count_as_complete(site: Path) -> None:
    (site / "plan_1").write_text("100 0\n")
    pod = start(pod_script(), site, **pod_variables())
    wait_for(site / "attempts_1")
    time.sleep(0.3)
    pod.send_signal(signal.SIGTERM)
    output, _ = pod.communicate(timeout=60)
    assert pod.returncode == 143, output
    assert (site / "saves").read_text() == "saved 1\n"


def test_shell_syntax(tmp_path: Path) -> None:
    script = tmp_path / "pod.sh"
    script.write_text("#!/usr/bin/env bash\n" + pod_script()[2])
    for path in (SCRIPT, script):
        subprocess.run(["bash", "-n", str(path)], check=True)
        if shutil.which("shellcheck"):
            # SC2154: set by the manifest.
            subprocess.run(["shellcheck", "--exclude=SC2154", str(path)], check=True)


def test_dockerfile_builds_from_files_that_exist_and_drops_root() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text()
    joined = re.sub(r"\\\n", " ", text)
    lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    known = {"FROM", "ARG", "SHELL", "RUN", "WORKDIR", "COPY", "USER", "ENV", "CMD"}
    instructions = [line.split()[0] for line in lines]
    assert instructions[0] == "FROM" and set(instructions) <= known
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users == ["trainer"]
    assert instructions.index("USER") > max(
        place for place, name in enumerate(instructions) if name in ("RUN", "COPY")
    )
    for line in lines:
        if line.startswith("COPY"):
            sources = [word for word in line.split()[1:-1] if not word.startswith("--")]
            assert all((ROOT / source).exists() for source in sources)
    # The build argument replaces the index of this requirement.
    assert re.search(r"^torch==", (ROOT / "requirements.txt").read_text(), re.MULTILINE)


def test_dev_container_is_json_and_runs_a_make_target() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    target = container["postCreateCommand"].removeprefix("make ")
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert container["remoteUser"] != "root"
