#!/usr/bin/env bash
# bash colab_setup.sh                      set up only
# bash colab_setup.sh run [--quick ...]    set up, execute the notebook, print the score and where the files are
# bash colab_setup.sh test [pytest ...]    set up, run the tests
#
# Outside Colab and Kaggle everything goes into .venv beside this file; inside, into the running Python, with torch,
# triton and all else that is there left as it is. PYTHON=/path/to/python chooses the Python: one that has all that
# is needed is used as it is, any other makes the .venv. Set up again at will: nothing is installed twice.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() { printf '\nSET-UP FAILED: %s\n' "$*" >&2; exit 1; }

works() { # PYTHON [MODULE...]: a Python of 3.10 to 3.13 that can import the modules
  local python=$1; shift
  "$python" -c "import importlib, sys
for name in sys.argv[1:]: importlib.import_module(name)
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))" "$@" >/dev/null 2>&1
}

find_python() { # the newest that can make environments, else the newest
  if [ -n "${PYTHON:-}" ]; then
    works "$PYTHON" || fail "PYTHON=$PYTHON does not run, or is not Python 3.10 to 3.13."
    echo "$PYTHON"; return
  fi
  local modules candidate
  for modules in "venv ensurepip" ""; do
    for candidate in python3.13 python3.12 python3.11 python3.10 python3 python; do
      # shellcheck disable=SC2086
      if works "$candidate" $modules; then echo "$candidate"; return; fi
    done
  done
  fail "no Python 3.10 to 3.13 found ($(python3 --version 2>&1 || true)). Install one, or name it: PYTHON=/path/to/python"
}

make_venv() {
  local python; python=$(find_python)
  if works .venv/bin/python pip; then
    [ -n "${PYTHON:-}" ] || return 0
    [ "$("$python" -V)" != "$(.venv/bin/python -V)" ] || return 0
  fi
  [ ! -e .venv ] || [ -f .venv/pyvenv.cfg ] || fail ".venv exists and is no Python environment: move it away."
  echo "making .venv with $("$python" -V) ($(command -v "$python"))"
  rm -rf .venv
  if works "$python" ensurepip; then
    "$python" -m venv .venv || fail "python -m venv failed (see above)."
  else # Debian and Ubuntu pack ensurepip apart
    "$python" -m venv --without-pip .venv 2>&1 && "$python" -m pip --python .venv/bin/python install --quiet pip ||
      fail "this Python has no ensurepip: sudo apt install python3-venv (then run the same command again)."
  fi
}

mode=${1:-setup}
[ $# -eq 0 ] || shift
case $mode in
  setup) groups=() ;;
  run) groups=(--group run) ;;
  test) groups=(--group run --group test) ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]##*/}"; exit 2 ;;
esac

if compgen -e | grep -qE '^(COLAB_|KAGGLE_KERNEL_RUN_TYPE$|KAGGLE_URL_BASE$|KAGGLE_DATA_PROXY_TOKEN$)'; then
  python=${PYTHON:-python3}
  works "$python" pip || fail "$python ($("$python" -V 2>&1)) is not Python 3.10 to 3.13 with pip."
  "$python" -m helpers.machine.install ${groups[@]+"${groups[@]}"}
elif [ -n "${PYTHON:-}" ] && "$PYTHON" -m helpers.machine.install --check ${groups[@]+"${groups[@]}"} >/dev/null 2>&1; then
  python=$PYTHON
else
  make_venv
  python=$PWD/.venv/bin/python
  "$python" -m helpers.machine.install --group run --group test
fi

case $mode in
  setup) echo "ready: $python" ;;
  run) exec "$python" -m helpers run "$@" ;;
  test) exec "$python" -m pytest "$@" ;;
esac
