"""Fake Slurm commands that start the steps of deploy/slurm on this machine. tests/resilience/slurm
has a real Slurm."""

from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "deploy/slurm/torchtitan_lite.sbatch"
_SRUN = """
output=/dev/stdout name=
while [[ "$1" == --* ]]; do
  case "$1" in
  --output=*) output=${1#--output=} ;;
  --job-name=*) name=${1#--job-name=} ;;
  --nodes=* | --ntasks=* | --ntasks-per-node=* | --nodelist=* | --overlap | --open-mode=append | \\
    --no-kill | --kill-on-bad-exit=?) ;;
  *) echo "srun: $1 is not expected" >&2; exit 2 ;;
  esac
  shift
done
env >>"$(dirname "$0")/srun.env"
setsid "$@" >>"${output//%n/0}" 2>&1 &
step=$!
file=$(dirname "$0")/steps/$step
echo "$name" >"$file"
trap 'kill -KILL -- "-$step" 2>/dev/null' TERM
while kill -0 "$step" 2>/dev/null; do wait "$step"; done
rm "$file"
wait "$step"
"""
"""Each step runs on one node, and its process is its id. As that of Slurm, srun does not forward
SIGTERM, but kills the step."""
_SQUEUE = """
case "$*" in *--steps*) ;; *) echo "$SLURM_JOB_NODELIST"; exit ;; esac
cd "$(dirname "$0")/steps" || exit
for step in *; do [ ! -f "$step" ] || echo "$step $(cat "$step")"; done
"""
_SCANCEL = """
[ "$1" = --signal=TERM ] && kill -TERM -- "-$2"
"""
_SCONTROL = """
case "$1" in
show) printf "%s\\n" $3 ;;
requeue) echo "$2" >>"$(dirname "$0")/requeued" ;;
esac
"""


def write_slurm_commands(folder: Path) -> None:
    """Write `srun`, `squeue`, `scancel` and `scontrol` into `folder`. SLURM_JOB_NODELIST must list
    the names of the nodes. The folder receives the environments of srun in `srun.env` and the jobs
    that were requeued in `requeued`."""
    for name, text in {
        "srun": _SRUN, "squeue": _SQUEUE, "scancel": _SCANCEL, "scontrol": _SCONTROL
    }.items():  # fmt: skip
        write_command(folder / name, text)
    (folder / "steps").mkdir()


def write_command(path: Path, text: str) -> None:
    """Write an executable bash script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)
