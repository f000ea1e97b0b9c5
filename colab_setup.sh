#!/usr/bin/env bash
# bash colab_setup.sh                             set up only
# bash colab_setup.sh run [--quick] [--out DIR]   set up, execute the notebook, print the score and where the files are
# bash colab_setup.sh test [PYTEST OPTION ...]    set up, run the tests
#
# In Colab and Kaggle it installs into the running Python and leaves every package that fits as it is, torch and triton
# always. Elsewhere it installs into .venv beside this file. It never changes a .venv that it cannot use, or a Python
# named by PYTHON=/path/to/python: it uses that one as it is if nothing is missing, else it makes an environment with
# it. It installs no package of this repository, and removes an editable nf4-triton that an earlier version left. A
# second run installs nothing and needs no network. The first takes 2 to 5 minutes and 2.5 GB, or 6 GB with a GPU.
set -euo pipefail
unset CDPATH
here=$PWD
[[ ${PYTHON:-} != ?*/* || $PYTHON = /* ]] || PYTHON=$here/$PYTHON
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
CPU_INDEX=https://download.pytorch.org/whl/cpu
CPU_TORCH=torch==2.13.0 # without that index: some machines have a CPU build of this one
tmp=$(mktemp -d)
log=$tmp/log
trap 'rm -rf "$tmp"' EXIT
exec 8>&2 # stderr, also while a command that is interrupted sends its own elsewhere
trap 'printf "\nInterrupted. Run the same command again to go on.\n" >&8; exit 130' INT TERM

fail() { printf '\nSET-UP FAILED: %s\n' "$*" >&2; exit 1; }

works() { # PYTHON [MODULE...]: it is Python 3.10 to 3.13 and imports the modules
  local python=$1; shift
  "$python" -c "import importlib, sys
for name in sys.argv[1:]: importlib.import_module(name)
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))" "$@" >/dev/null 2>&1
}

find_python() { # the newest that can make environments, else the newest
  local modules candidate candidates=(python3.13 python3.12 python3.11 python3.10 python3 python)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for modules in "venv ensurepip" ""; do
    for candidate in "${candidates[@]}"; do
      # shellcheck disable=SC2086
      if works "$candidate" $modules; then echo "$candidate"; return; fi
    done
  done
  fail "no Python 3.10 to 3.13 found (${PYTHON:-$(python3 -V 2>&1 || true)}). Install one, or set PYTHON=/path/to/python."
}

make_venv() { # sets `python`
  local base venv=.venv; base=$(find_python)
  fits() { works "$1/bin/python" && { [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" -V)" = "$("$1/bin/python" -V)" ]; }; }
  if ! fits .venv && { [ -e .venv ] || [ -L .venv ]; }; then
    venv=.venv-py$("$base" -c 'import sys; print(*sys.version_info[:2], sep=".")')
    echo "leaving .venv unchanged ($(.venv/bin/python -V 2>&1 || true)); using $venv"
  fi
  if ! fits $venv; then
    echo "making $venv with $("$base" -V)"
    "$base" -m venv --without-pip $venv >"$log" 2>&1 || fail "cannot make $PWD/$venv: $(tail -n 1 "$log")"
  fi
  python=$PWD/$venv/bin/python
  works "$python" pip || add_pip "$base" >/dev/null 2>&1 || fail "$venv has no pip and none could be added:" \
    "sudo apt install python3-venv, then run the same command again."
}

add_pip() { # Debian and Ubuntu package ensurepip separately
  "$python" -m ensurepip || "$1" -m pip --python "$python" install pip || uv pip install --python "$python" pip
}

need() { # GROUP...: the lines of requirements.txt that apply, without their `extra`
  local groups; groups=$(IFS='|'; echo "$*")
  sed -nE "s/ *; extra == \"($groups)\"\$//; /^#|^\$|extra ==/!p" requirements.txt
}

missing() { # PYTHON FILE KEEP: prints what FILE asks for and PYTHON lacks; pins in $tmp/constraints what fits
  "$1" - "$2" "$tmp/constraints" "$3" 2>>"$log" <<'PYTHON'
import importlib.metadata, re, sys
from pip._vendor.packaging.requirements import Requirement
file, constraints, keep = sys.argv[1:]
have = {re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version
        for d in reversed(list(importlib.metadata.distributions())) if d.metadata["Name"] and d.version}
for need in map(Requirement, open(file)):
    name = re.sub(r"[-_.]+", "-", need.name).lower()
    if not need.specifier.contains(have.get(name, "0.0.0.dev0"), prereleases=True) or name not in have:
        print(f"{need} (installed: {have.pop(name, 'none')})")
pinned = have if keep == "all" else {"torch", "triton"} & have.keys()
open(constraints, "w").writelines(f"{name}=={have[name]}\n" for name in sorted(pinned))
PYTHON
}

pip() { # WHAT OPTION...: install with uv if it is on PATH, else with pip
  echo "installing $1 ..."; shift
  if command -v uv >/dev/null; then uv pip install --python "$python" "$@"; else
    "$python" -m pip --disable-pip-version-check install --quiet --no-compile "$@"
  fi >"$log" 2>&1
}

explain() { # why pip failed, from its output
  grep -iE '^ *(error|×|╰|.*because)' "$log" | tail -n 4 >&2 || tail -n 4 "$log" >&2
  case $(<"$log") in
    *"No space left"* | *"Errno 28"*) fail "the disk is full: free some space and run the same command again." ;;
    *onnection* | *"name resolution"* | *imeout* | *ProxyError* | *unreachable* | *"error sending request"*)
      fail "the package index did not answer: check the network (proxy; in Kaggle: Settings > Internet on) and run" \
        "the same command again." ;;
    *) fail "pip could not install what is named above." ;;
  esac
}

check_gpu() { # stops where the kernel cannot run
  [ "$(uname)" = Linux ] || fail "Triton runs on Linux only. On Windows use WSL; on a Mac use Google Colab."
  gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | paste -sd ,) || gpus=
  local newest; newest=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -V | tail -n 1) || newest=
  case $newest in
    [1-6].* | 7.[0-4]) fail "$gpus (compute capability $newest): the kernel needs 7.5 (a Tesla T4) or newer." ;;
  esac
  [ -z "$hosted" ] || [ -n "$gpus" ] || [ "${NF4_ALLOW_CPU:-}" = 1 ] || fail "no GPU here. In Colab choose Runtime >" \
    "Change runtime type > T4 GPU; in Kaggle Settings > Accelerator > GPU T4 x2. To go on without one (correctness" \
    "only, no speed) set NF4_ALLOW_CPU=1."
}

install() { # what is missing
  local keep=torch lacking; [ -z "$hosted" ] || keep=all
  lacking=$(missing "$python" "$tmp/need" $keep) || fail "$(tail -n 1 "$log")"
  if [ -n "$lacking" ]; then
    if [ -n "$hosted" ] && unfit=$(grep -E '^(torch|triton)[<>=].*installed: [0-9]' <<<"$lacking"); then
      fail "$unfit. Setup does not replace Colab's or Kaggle's own: start a new runtime with the newest image."
    fi
    if grep -q '^torch[<>=].*installed: none' <<<"$lacking" && [ -z "$gpus" ]; then
      # isolated: pip's own settings may name another index, whose torch comes with gigabytes of CUDA
      echo "installing torch, CPU build ..."
      "$python" -m pip --isolated install -q --index-url $CPU_INDEX --timeout 10 --retries 1 "$(need | grep ^torch)" \
        >"$log" 2>&1 || pip "$CPU_TORCH ($CPU_INDEX did not answer)" $CPU_TORCH || explain
      missing "$python" "$tmp/need" $keep >/dev/null
    fi
    pip "$(sed 's/[^a-zA-Z0-9_-].*//' "$tmp/main" | paste -sd ' ')" -r "$tmp/main" -c "$tmp/constraints" || explain
    [ -z "$gpus" ] || pip "unsloth unsloth_zoo cut_cross_entropy" --no-deps -r "$tmp/alone" || explain
  fi
}

remove_editable() { # nf4-triton that points to this folder, or to one that is gone: it would break `import bitsandbytes`
  if "$python" -c '
import importlib.metadata, json, os, sys, urllib.parse
for one in importlib.metadata.distributions(name="nf4-triton"):
    origin = json.loads(one.read_text("direct_url.json") or "{}")
    folder = urllib.parse.unquote(urllib.parse.urlsplit(origin.get("url", "")).path)
    editable = origin.get("dir_info", {}).get("editable")
    if editable and (not os.path.exists(folder) or os.path.samefile(folder, os.curdir)): sys.exit(3)
' 2>>"$log"; [ $? = 3 ]; then
    echo "uninstalling the editable nf4-triton that an earlier version installed"
    "$python" -m pip uninstall -qy nf4-triton >"$log" 2>&1 || fail "$(tail -n 1 "$log")"
  fi
}

usage() { sed -n '2,11s/^# \{0,1\}//p' colab_setup.sh; }
absolute() { case $1 in /*) echo "$1" ;; *) echo "$here/$1" ;; esac; } # as seen from the caller's folder
wrong() { echo "colab_setup.sh: unknown $*" >&2; usage >&2; exit 2; }
mode=${1:-setup}
[ $# -eq 0 ] || shift
case $mode in
  run) options=() previous=
    for option; do
      case $option in
        -h | --help) usage; exit ;;
        --out=*) option=--out=$(absolute "${option#--out=}") ;;
        --quick | --in-place | --out) ;;
        -*) wrong "option of run: $option" ;;
        *) [ "$previous" != --out ] || option=$(absolute "$option") ;;
      esac
      options+=("$option") previous=$option
    done
    set -- ${options[@]+"${options[@]}"} ;;
  setup) [ $# -eq 0 ] || wrong "argument of setup: $1" ;;
  test) ;;
  -h | --help | help) usage; exit ;;
  *) wrong "command: $mode" ;;
esac
hosted=$(compgen -e | grep -E '^(COLAB_|KAGGLE_KERNEL_RUN_TYPE$|KAGGLE_URL_BASE$|KAGGLE_DATA_PROXY_TOKEN$)') || true
check_gpu
groups=(${gpus:+gpu})
[ -n "$hosted" ] && [ $mode != test ] || groups+=(test)
need "${groups[@]-}" | sed "${hosted:+/^jupyter/d}" >"$tmp/main"
[ -z "$gpus" ] || sed -n 's/ *; extra == "unsloth"$//p' requirements.txt >"$tmp/alone"
cat "$tmp"/main ${gpus:+"$tmp/alone"} >"$tmp/need"

if mkdir -p build 2>/dev/null && { : >>build/setup.lock; } 2>/dev/null && command -v flock >/dev/null; then
  exec 9>>build/setup.lock
  flock -n 9 || { echo "waiting for another set-up in this folder"; flock 9; }
fi
if [ -n "$hosted" ]; then
  python=${PYTHON:-python3}
  works "$python" pip || fail "$python ($("$python" -V 2>&1)) is not Python 3.10 to 3.13 with pip."
  install
elif [ -n "${PYTHON:-}" ] && works "$PYTHON" pip._vendor.packaging.requirements &&
  [ -z "$(missing "$PYTHON" "$tmp/need" torch)" ]; then
  python=$PYTHON
else
  make_venv
  install
fi
remove_editable
"$python" -c '
import sys, torch, triton, bitsandbytes
from helpers import machine
print(f"torch {torch.__version__}, triton {triton.__version__}, bitsandbytes {bitsandbytes.__version__}")
if sys.argv[1] and (problem := machine.no_gpu()): raise SystemExit(problem)
' "$gpus" 2>"$log" || fail "$(tail -n 3 "$log")"
exec 9>&- # the lock
rm -rf "$tmp"

case $mode in
  setup) echo "ready: $python" ;;
  run) exec "$python" -m helpers run "$@" ;;
  test) exec "$python" -m pytest -n auto --dist worksteal "$@" ;;
esac
