#!/usr/bin/env bash
# bash colab_setup.sh                     set up only
# bash colab_setup.sh run                 set up, execute the notebook, print the score
# bash colab_setup.sh test [OPTION ...]   set up, run the tests; options of pytest
#
# In Colab and Kaggle it adds what is missing to the running Python; versions that requirements.txt accepts stay.
# Elsewhere it makes .venv beside this file: 2 to 5 minutes and 3 GB, or 6 GB with a GPU. A second run needs no network.
# In .venv it also installs nf4_triton from this folder, so that NF4_TRITON=1 works there.
# It changes no environment that it did not make: PYTHON=/path/to/python, or a .venv of yours, is used as it is.
set -euo pipefail
here=$PWD
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
OURS=.venv/colab_setup # marks a .venv that this script made; holds what it installed there
trap 'printf "\nInterrupted. Run the same command again to go on.\n" >&2; exit 130' INT TERM

fail() { printf '\nSET-UP FAILED: %s\n' "$*" >&2; exit 1; }
usage() { sed -n '2,9s/^# \{0,1\}//p' colab_setup.sh; }

mode=${1:-setup}; [ $# -eq 0 ] || shift
case "$mode ${1:-}" in
  -h\ * | --help\ * | "run -h" | "run --help") usage; exit ;;
  "setup " | "run "* | "test "*) ;;
  *) usage >&2; printf '\ncolab_setup.sh: unknown command: %s\n' "$mode $*" >&2; exit 2 ;;
esac
gpu=$(nvidia-smi -L 2>/dev/null) || gpu=
hosted=${COLAB_RELEASE_TAG:-}${KAGGLE_KERNEL_RUN_TYPE:-}
[ "$(uname)" = Linux ] || fail "Triton runs on Linux only. On Windows use WSL; on a Mac use Google Colab."
[ -z "$hosted" ] || [ -n "$gpu" ] || [ "${NF4_ALLOW_CPU:-}" = 1 ] || fail "no GPU here. In Colab choose Runtime > Change" \
  "runtime type > T4 GPU; in Kaggle Settings > Accelerator > GPU T4 x2. To go on without one (correctness only, no" \
  "speed) set NF4_ALLOW_CPU=1."

skip=unsloth # of requirements.txt
[ -n "$gpu" ] || skip+="|gpu"
[ -z "$hosted" ] || [ "$mode" = test ] || skip+="|test"
mapfile -t packages < <(sed -E "${hosted:+/^jupyter/d;}/extra == \"($skip)\"/d; s/ *; extra ==.*//; /^#|^\$/d" requirements.txt)
mapfile -t alone < <(sed -n 's/ *; extra == "unsloth"$//p' requirements.txt)

quietly() { # WHAT COMMAND...: shows the last line of a command that fails; in a subshell, or Ctrl-C is told to the log
  echo "$1; progress is in build/setup.log ..."
  mkdir -p build
  ("${@:2}") >build/setup.log 2>&1 || fail "$1: $(tail -n 1 build/setup.log) (all of it: build/setup.log). Is there a" \
    "network, and room on the disk? Then run the same command again."
}

pip() { # with uv where it is on PATH
  if command -v uv >/dev/null; then uv pip install --python "$python" "$@"; return; fi
  "$python" -m pip --disable-pip-version-check install "$@"
}

cpu_torch() { # isolated: pip's own settings may name another index, whose torch comes with gigabytes of CUDA
  "$python" -m pip --isolated install --index-url https://download.pytorch.org/whl/cpu --timeout 10 --retries 1 \
    "$(grep ^torch requirements.txt)" || pip torch==2.13.0 # some machines have a CPU build of this one
}

kept() { # prints NAME==VERSION of torch, Triton, and every package whose installed version fits its requirement
  "$python" -m pip list --format=freeze 2>/dev/null | "$python" -c '
import sys
from packaging.requirements import Requirement
ranges = {need.name: need.specifier for need in map(Requirement, sys.argv[1:])}
for line in sys.stdin.read().split():
    name, _, version = line.partition("==")
    if name in ("torch", "triton") or name in ranges and ranges[name].contains(version, prereleases=True): print(line)
' "${packages[@]}"
}

make_venv() {
  mkdir -p .venv && : >>$OURS || return
  if command -v uv >/dev/null; then uv venv --seed -q --allow-existing --python ">=3.10,<3.14" .venv; return; fi
  local base suits="import ensurepip, sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))"
  for base in python3 python3.13 python3.12 python3.11 python3.10; do
    if "$base" -c "$suits" 2>/dev/null; then "$base" -m venv .venv; return; fi
  done
  fail "no Python 3.10 to 3.13 with venv found ($(python3 -V 2>&1)): install one, or sudo apt install python3-venv"
}

python=$PWD/.venv/bin/python
remedy="Nothing is installed in an environment of yours: install requirements.txt there, for the tests also its test lines"
if [ -n "${PYTHON:-}" ]; then
  [[ $PYTHON != [!/]*/* ]] || PYTHON=$here/$PYTHON
  python=$PYTHON; echo "using $python as it is"
elif [ -n "$hosted" ]; then
  python=$(command -v python3) remedy="Restart the runtime, then run this again"
  versions=$(kept) || fail "$python needs pip and packaging: install them, then run this again."
  quietly "installing what is missing" pip "${packages[@]}" -c <(echo "$versions")
  [ -z "$gpu" ] || quietly "installing Unsloth" pip --no-deps "${alone[@]}"
elif [ -e .venv ] && [ ! -e $OURS ]; then
  echo "using .venv as it is: this script did not make it"
else
  remedy="Remove .venv, then run this again"
  if ! "$python" -m pip --version >/dev/null 2>&1; then
    echo "making .venv ..."
    make_venv || fail "cannot make .venv, see above. $remedy."
  fi
  wanted="-e . ${packages[*]} ${gpu:+${alone[*]}}"
  if [ "$(<$OURS)" != "$wanted" ]; then
    [ -n "$gpu" ] || "$python" -c "import torch" 2>/dev/null || quietly "installing torch, CPU build" cpu_torch
    quietly "installing ${#packages[@]} packages and what they need" pip "${packages[@]}"
    [ -z "$gpu" ] || quietly "installing Unsloth" pip --no-deps "${alone[@]}"
    quietly "installing nf4_triton from this folder" pip --no-deps --no-build-isolation -e .
    echo "$wanted" >$OURS
  fi
fi
needed="torch triton bitsandbytes"
[ "$mode" != test ] || needed+=" pytest xdist pytest_timeout"
found=$("$python" -c '
import importlib, sys
gpu, remedy, needed = sys.argv[1:]
if not (3, 10) <= sys.version_info[:2] <= (3, 13): raise SystemExit("expected Python 3.10 to 3.13")
try: modules = [importlib.import_module(name) for name in needed.split()]
except ImportError as error: raise SystemExit(f"{error}. {remedy}.")
from helpers import machine
if gpu and (problem := machine.no_gpu()): raise SystemExit(problem)
print(", ".join(f"{module.__name__} {module.__version__}" for module in modules[:3]))
' "$gpu" "$remedy" "$needed" 2>&1) || fail "$python: ${found##*$'\n'}"
echo "${found##*$'\n'}"

case $mode in
  setup) echo "ready: $python" ;;
  run)
    [ -z "$gpu" ] || exec "$python" -m helpers run "$@"
    "$python" -m helpers run "$@"
    echo "No score without a GPU: nothing was timed. Run this on an NVIDIA T4 or newer, or open the notebook in Colab."
    ;;
  test) exec "$python" -m pytest -n auto --dist worksteal "$@" ;;
esac
