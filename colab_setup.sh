#!/usr/bin/env bash
# bash colab_setup.sh                                          set up only
# bash colab_setup.sh run [--quick] [--in-place] [--out DIR]   set up, execute the notebook, print the score
# bash colab_setup.sh test [PYTEST OPTION ...]                 set up, run the tests
#
# In Colab and Kaggle it adds what is missing to the running Python; torch and triton stay as they are. Elsewhere it
# makes .venv beside this file: 2 to 5 minutes and 3 GB, or 6 GB with a GPU. A second run needs no network. It changes
# no environment that it did not make: PYTHON=/path/to/python, or a .venv of yours, is used as it is.
set -euo pipefail
here=$PWD
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
CPU_INDEX=https://download.pytorch.org/whl/cpu
CPU_TORCH=torch==2.13.0 # without that index: some machines have a CPU build of this one
OURS=.venv/colab_setup  # marks a .venv that this script made; holds what it installed there
trap 'printf "\nInterrupted. Run the same command again to go on.\n" >&2; exit 130' INT TERM

fail() { printf '\nSET-UP FAILED: %s\n' "$*" >&2; exit 1; }
usage() { sed -n '2,8s/^# \{0,1\}//p' colab_setup.sh; }
absolute() { case $1 in /*) echo "$1" ;; "~/"*) echo "$HOME${1#\~}" ;; *) echo "$here/$1" ;; esac; }
wrong() { usage >&2; printf '\ncolab_setup.sh: %s\n' "$*" >&2; exit 2; }

gpu=$(nvidia-smi -L 2>/dev/null) || gpu=
hosted=$(compgen -e | grep -E '^(COLAB_|KAGGLE_KERNEL_RUN_TYPE$|KAGGLE_URL_BASE$|KAGGLE_DATA_PROXY_TOKEN$)') || true
mode=${1:-setup}; [ $# -eq 0 ] || shift
arguments=()
case $mode in
  setup) [ $# -eq 0 ] || wrong "unknown argument of setup: $1" ;;
  test) arguments=("$@") ;;
  run)
    while [ $# -gt 0 ]; do
      [[ $1 != --out=* ]] || set -- --out "${1#--out=}" "${@:2}"
      case $1 in
        -h | --help) usage; exit ;;
        --quick) arguments+=("$1") ;;
        --in-place) [ -n "$gpu" ] || fail "--in-place stores what a GPU measured, and there is none. Leave it out."
          arguments+=("$1") ;;
        --out) [ -n "${2:-}" ] || wrong "--out needs a folder"
          out=$(absolute "$2")
          mkdir -p -- "$out" && [ -w "$out" ] || fail "cannot write to $out. Name another folder with --out."
          arguments+=("--out=$out")
          shift ;;
        *) wrong "unknown option of run: $1" ;;
      esac
      shift
    done ;;
  -h | --help | help) usage; exit ;;
  *) wrong "unknown command: $mode" ;;
esac
[ "$(uname)" = Linux ] || fail "Triton runs on Linux only. On Windows use WSL; on a Mac use Google Colab."
[ -z "$hosted" ] || [ -n "$gpu" ] || [ "${NF4_ALLOW_CPU:-}" = 1 ] || fail "no GPU here. In Colab choose Runtime > Change" \
  "runtime type > T4 GPU; in Kaggle Settings > Accelerator > GPU T4 x2. To go on without one (correctness only, no" \
  "speed) set NF4_ALLOW_CPU=1."

skip=unsloth # of requirements.txt
[ -n "$gpu" ] || skip+="|gpu"
[ -z "$hosted" ] || [ "$mode" = test ] || skip+="|test"
mapfile -t packages < <(sed -E "${hosted:+/^jupyter/d;}/extra == \"($skip)\"/d; s/ *; extra ==.*//; /^#|^\$/d" requirements.txt)
mapfile -t alone < <(sed -n 's/ *; extra == "unsloth"$//p' requirements.txt)

quietly() { # WHAT COMMAND...: shows the command's output only if it fails
  local output; echo "$1 ..."
  output=$("${@:2}" 2>&1) || fail "$output"
}

pip() { # with uv where it is on PATH
  if command -v uv >/dev/null; then uv pip install --python "$python" "$@"; return; fi
  "$python" -m pip --disable-pip-version-check install "$@"
}

make_venv() {
  mkdir -p .venv
  : >>$OURS
  if command -v uv >/dev/null; then uv venv --seed --allow-existing --python ">=3.10,<3.14" .venv; return; fi
  local base suits="import ensurepip, sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))"
  for base in python3 python3.13 python3.12 python3.11 python3.10; do
    if "$base" -c "$suits" 2>/dev/null; then "$base" -m venv .venv; return; fi
  done
  echo "no Python 3.10 to 3.13 with venv found ($(python3 -V 2>&1)): install one, or sudo apt install python3-venv"; return 1
}

python=$PWD/.venv/bin/python
if [ -n "${PYTHON:-}" ]; then
  [[ $PYTHON != */* ]] || PYTHON=$(absolute "$PYTHON")
  python=$PYTHON; echo "using $python as it is"
elif [ -n "$hosted" ]; then
  python=$(command -v python3)
  kept=$("$python" -m pip list --format=freeze 2>/dev/null | grep -E '^(torch|triton)==') || true
  quietly "installing what is missing" pip "${packages[@]}" -c <(echo "$kept")
  [ -z "$gpu" ] || quietly "installing Unsloth" pip --no-deps "${alone[@]}"
elif [ -e .venv ] && [ ! -e $OURS ]; then
  echo "using .venv as it is: this script did not make it"
else
  "$python" -m pip --version >/dev/null 2>&1 || quietly "making .venv" make_venv
  if [ "$(<$OURS)" != "${packages[*]} ${gpu:+${alone[*]}}" ]; then
    if [ -z "$gpu" ] && ! "$python" -c "import torch" 2>/dev/null; then
      echo "installing torch, CPU build ..."
      # isolated: pip's own settings may name another index, whose torch comes with gigabytes of CUDA
      "$python" -m pip --isolated install -q --index-url $CPU_INDEX --timeout 10 --retries 1 \
        "$(grep ^torch requirements.txt)" >/dev/null 2>&1 || quietly "$CPU_INDEX does not answer" pip $CPU_TORCH
    fi
    quietly "installing ${#packages[@]} packages and what they need" pip "${packages[@]}"
    [ -z "$gpu" ] || quietly "installing Unsloth" pip --no-deps "${alone[@]}"
    echo "${packages[*]} ${gpu:+${alone[*]}}" >$OURS
  fi
fi
found=$("$python" -c '
import sys
if not (3, 10) <= sys.version_info[:2] <= (3, 13): raise SystemExit("expected Python 3.10 to 3.13")
import torch, triton, bitsandbytes
from helpers import machine
if sys.argv[1] and (problem := machine.no_gpu()): raise SystemExit(problem)
print(f"torch {torch.__version__}, triton {triton.__version__}, bitsandbytes {bitsandbytes.__version__}")
' "$gpu" 2>&1) || fail "$python: ${found##*$'\n'}"
echo "${found##*$'\n'}"

case $mode in
  setup) echo "ready: $python" ;;
  run) exec "$python" -m helpers run ${arguments[@]+"${arguments[@]}"} ;;
  test) exec "$python" -m pytest -n auto --dist worksteal ${arguments[@]+"${arguments[@]}"} ;;
esac
