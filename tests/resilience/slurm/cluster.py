"""A Slurm cluster on one machine: a controller and nodes, each a namespace with a network, a host
name, shared memory and cgroups of its own.

The daemons and commands are those of the distribution's packages (Debian: slurmctld, slurmd,
slurm-client). Jobs run as root, without munge: the network of the namespaces has no other users.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.resilience.network import namespaces
from tests.resilience.network.namespaces import Network

CONTROLLER = "controller"
PARTITION = "debug"
ACCOUNT = "research"
CPUS_PER_NODE = 2
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
_START_S = 60.0
# The kernel may have cgroups of either version, or none that slurmd may write to.
_OWN_MOUNTS = (
    "mount -t tmpfs tmpfs /sys/fs/cgroup && mount -t tmpfs -o size=1g tmpfs /dev/shm "
    # Daemons end with this process, however it ends.
    '&& exec setpriv --pdeathsig KILL "$@"'
)


def unavailable_reason() -> str | None:
    """Return why this process cannot start a Slurm cluster; None if it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} of Slurm is not installed"
    return namespaces.unavailable_reason()


@contextmanager
def cluster(folder: Path, num_nodes: int = 3) -> Iterator["Cluster"]:
    """Start a controller and the nodes n1, n2, ... On exit, all processes in their namespaces, the
    jobs included, and the namespaces are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = [f"n{place}" for place in range(1, num_nodes + 1)]
    with Network([CONTROLLER, *nodes]) as network:
        started = Cluster(folder, network, nodes)
        try:
            started.start()
            yield started
        finally:
            started.stop()


class Cluster:
    """A running cluster. The paths of `folder` are the same on all nodes."""

    def __init__(self, folder: Path, network: Network, nodes: Sequence[str]) -> None:
        self._folder, self._network, self.nodes = folder, network, nodes
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.state = folder / "state"
        """What the controller stores about jobs."""

    def start(self) -> None:
        """Start all daemons, and block until all nodes are idle."""
        names = (CONTROLLER, *self.nodes)
        hosts = "".join(f"{self._network.address(name)} {name}\n" for name in names)
        for name in names:
            self._network.set_hosts(name, f"127.0.0.1 localhost\n{hosts}")
        self.state.mkdir(mode=0o700)
        self._write_configuration()
        self._start_daemon(CONTROLLER, "slurmctld", "-D")
        for name in self.nodes:
            self.start_node(name)
        self.wait(lambda: self.idle_nodes() == set(self.nodes), _START_S)

    def start_node(self, name: str) -> None:
        """Start the daemon of a node, as when the node boots."""
        self._start_daemon(name, "slurmd", "-D", "-N", name)

    def _start_daemon(self, host: str, *command: str) -> None:
        with (self._folder / f"{host}.log").open("ab") as log:
            daemon = subprocess.Popen(
                [*self._network.command(host), "sh", "-c", _OWN_MOUNTS, "sh", *command],
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._daemons.append(daemon)

    def _write_configuration(self) -> None:
        nodes = "".join(
            f"NodeName={name} NodeHostname={name} NodeAddr={self._network.address(name)} "
            f"CPUs={CPUS_PER_NODE} RealMemory=8000 Gres=gpu:1\n"
            for name in self.nodes
        )
        address = self._network.address(CONTROLLER)
        values = {
            "folder": self._folder,
            "state": self.state,
            "controller": f"{CONTROLLER}({address})",
            "partition": PARTITION,
        }
        text = _CONFIGURATION.format_map(values) + nodes
        (self._folder / "slurm.conf").write_text(text)
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self._folder / "gres.conf").write_text("Name=gpu Count=1 File=/dev/null\n")

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self._folder / "slurm.conf")}

    def run(
        self, *command: str, host: str = CONTROLLER, cwd: Path | None = None, **variables: str
    ) -> str:
        """Return the output of a command on a host. Raises RuntimeError if it fails."""
        done = subprocess.run(
            [*self._network.command(host), *command],
            cwd=cwd,
            env={**self._environment(), **variables},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"`{' '.join(command)}`: {done.stderr.strip()}\n{self.report()}")
        return done.stdout

    def idle_nodes(self) -> set[str]:
        """Return the nodes that are ready for a job."""
        with suppress(RuntimeError):
            return set(self.run("sinfo", "--noheader", "-N", "-t", "idle", "-o", "%N").split())
        return set()

    def node_state(self, name: str) -> str:
        """Return the state of a node, such as `allocated` or `down*`."""
        return self.run("sinfo", "--noheader", "-n", name, "-o", "%T").strip()

    def processes(self, name: str) -> list[int]:
        """Return the processes of a host, those of jobs included."""
        return self._network.processes(name)

    def power_off(self, name: str) -> None:
        """Cut a node off, and kill all its processes: its peers receive no end of connections."""
        self._network.unplug(name)
        _kill_all(lambda: self.processes(name))

    def wait(
        self,
        holds: Callable[[], object],
        timeout_s: float,
        report: Callable[[], str] | None = None,
    ) -> None:
        """Block until the condition holds. If it does not, fail with `report`, by default that of
        the daemons."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, (report or self.report)()
            time.sleep(0.2)

    def report(self) -> str:
        """Return the ends of the daemons' logs."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2500:]}" for log in logs)

    def stop(self) -> None:
        """Kill all processes of all hosts."""
        for name in (CONTROLLER, *self.nodes):
            _kill_all(lambda name=name: self.processes(name))
        for daemon in self._daemons:
            daemon.wait()


def _kill_all(pids: Callable[[], list[int]]) -> None:
    """Kill processes until none is left."""
    deadline = time.monotonic() + 20
    while left := pids():
        assert time.monotonic() < deadline, left
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


_CONFIGURATION = """
ClusterName=tlite
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
MailProg=/bin/true
SlurmdParameters=config_overrides
StateSaveLocation={state}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdTimeout=10
ReturnToService=2
InactiveLimit=0
KillWait=30
MinJobAge=3600
PartitionName={partition} Nodes=ALL Default=NO MaxTime=INFINITE State=UP
"""
