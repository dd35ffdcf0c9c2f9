#!/usr/bin/env bash
# The GPU tests and the GPU benchmark on a machine that may have no package index (docs/gpu.md).
#
#   scripts/gpu_suite.sh prepare WHEELS [PYTHON_VERSION]   download what such a machine lacks (here)
#   scripts/gpu_suite.sh test WHEELS RESULTS [...]         tests/gpu (there), with options of pytest
#                                                          other than -m and -n
#   scripts/gpu_suite.sh bench WHEELS RESULTS CASE [...]   case a, b, c or saves (there)
#
# WHEELS is - where everything is installed. PYTHON names the interpreter of the GPU machine (default
# python3), WORKERS the number of tests at a time (default 12), BUDGET_S the time after which no
# further test starts (default 520). Each result is written to RESULTS when it is known.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
site=${SITE:-${TMPDIR:-/tmp}/gpu_suite_site}

usage() { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }

prepare() {
  version=${2:-3.12}
  platforms=()
  for number in 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${number}_x86_64"); done
  mkdir -p "$1"
  "$python" -m pip download --quiet --no-deps --only-binary=:all: \
    --python-version "$version" --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
    --dest "$1" --requirement requirements-gpu.txt
  echo "$(find "$1" -name '*.whl' | wc -l) wheels for Python $version, $(du -sm "$1" | cut -f1) MiB"
}

# Packages of the machine stay as they are: the wheels go to a folder of their own.
install() {
  if [ "$1" != - ]; then
    if ! cmp --silent requirements-gpu.txt "$site/.installed"; then
      "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" "$1"/*.whl
      cp requirements-gpu.txt "$site/.installed"
    fi
    export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
  fi
  # What runs alone may use all cores.
  OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
  export OMP_NUM_THREADS
  # All processes are on this machine, whose name may not resolve.
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
  export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 PYTHONUNBUFFERED=1
}

# Runs the tests that a marker selects; an empty selection is not an error.
run_tests() {
  results=$1 marker=$2 number=$3 status=0
  shift 3
  budget_s=$((${BUDGET_S:-520} - SECONDS))
  # The machine's own plugins may not fit this pytest. Another version of torch or numpy may warn
  # where the pinned one does not.
  PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "$python" -m pytest -p pytest_timeout -p xdist tests/gpu \
    -m "gpu and $marker" -W default --durations 10 -n "$number" --dist load \
    --gpu-results "$results" --budget-s "$((budget_s > 0 ? budget_s : 0))" "$@" || status=$?
  [ $status -eq 5 ] || return $status
}

# Read as a whole before it runs, so that the file may change meanwhile.
main() {
  [ $# -ge 2 ] || usage
  command=$1
  shift
  case $command in
    prepare)
      prepare "$@"
      ;;
    test)
      [ $# -ge 2 ] || usage
      wheels=$1 results=$2
      shift 2
      install "$wheels"
      failed=0
      # The tests share the cores.
      OMP_NUM_THREADS=2 run_tests "$results" "not alone" "${WORKERS:-12}" "$@" || failed=$?
      # Interrupted, or given a wrong option.
      [ $failed -le 1 ] || return $failed
      run_tests "$results" alone 0 "$@" || failed=$?
      return $failed
      ;;
    bench)
      [ $# -ge 3 ] || usage
      wheels=$1 results=$2 case=$3
      shift 3
      install "$wheels"
      "$python" -m benchmarks.gpu --case "$case" --json "$results/gpu.json" "$@"
      ;;
    *)
      usage
      ;;
  esac
}

main "$@"
