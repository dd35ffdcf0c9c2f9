"""Fake Slurm commands that start the steps of deploy/slurm on this machine."""

from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "deploy/slurm/torchtitan_lite.sbatch"
_SRUN = """
output=/dev/stdout
while [[ "$1" == --* ]]; do
  case "$1" in
  --output=*) output=${1#--output=} ;;
  --nodes=* | --ntasks=* | --ntasks-per-node=* | --nodelist=* | --overlap | --open-mode=append | \\
    --kill-on-bad-exit=1) ;;
  *) echo "srun: $1 is not expected" >&2; exit 2 ;;
  esac
  shift
done
exec "$@" >>"${output//%n/0}" 2>&1
"""
"""Each step runs on one node. srun forwards signals, as exec does here."""


def write_slurm_commands(folder: Path) -> None:
    """Write `srun` and `scontrol` into `folder`. SLURM_JOB_NODELIST must list the names."""
    write_command(folder / "srun", _SRUN)
    write_command(folder / "scontrol", 'printf "%s\\n" $3')


def write_command(path: Path, text: str) -> None:
    """Write an executable bash script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)
