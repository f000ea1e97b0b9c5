#!/usr/bin/env bash
# bash colab_setup.sh                      set up only
# bash colab_setup.sh run [--quick ...]    set up, execute the notebook, print the score and where the files are
# bash colab_setup.sh test [pytest ...]    set up, run the tests
#
# Outside Colab and Kaggle everything goes into .venv beside this file; inside, into the running Python, with torch,
# triton and all else that is there left as it is. A .venv that is there is used, with pip added where it has none;
# one that cannot be used (another Python, or none) stays untouched, and .venv-py3.12 or the like is made beside it.
# PYTHON=/path/to/python chooses the Python: one that has all that is needed is used as it is. Set up again at will:
# nothing is installed twice, and two set-ups at once wait for each other.
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # this folder's `helpers`, also with PYTHONSAFEPATH=1

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

fits() { # FOLDER: an environment that can be used, of PYTHON's version where that is set
  works "$1/bin/python" && { [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" -V)" = "$("$1/bin/python" -V)" ]; }
}

make_venv() { # sets `venv`
  local python; python=$(find_python)
  venv=.venv
  if [ -e .venv ] || [ -L .venv ]; then
    fits .venv || venv=.venv-py$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')
  fi
  if ! fits "$venv"; then
    [ $venv = .venv ] || echo ".venv is not used and stays as it is: $(.venv/bin/python -V 2>&1 || true)"
    echo "making $venv with $("$python" -V) ($(command -v "$python"))"
    "$python" -m venv --without-pip "$venv" || fail "python -m venv $venv failed (see above)."
  fi
  works "$venv/bin/python" pip || add_pip "$venv/bin/python" "$python" >/dev/null 2>&1 || fail "$venv has no pip and none" \
    "could be added: sudo apt install python3-venv (or: uv pip install --python $venv pip), then run the same command again."
}

add_pip() { # ENVIRONMENT'S PYTHON, ANOTHER: Debian and Ubuntu pack ensurepip apart
  "$1" -m ensurepip || "$2" -m pip --python "$1" install pip || uv pip install --python "$1" pip
}

mode=${1:-setup}
[ $# -eq 0 ] || shift
case $mode in
  setup) groups=() ;;
  run) groups=(--group run) ;;
  test) groups=(--group run --group test) ;;
  *) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]##*/}"; exit 2 ;;
esac

if mkdir -p build 2>/dev/null && { : >>build/setup.lock; } 2>/dev/null && command -v flock >/dev/null; then
  exec 9>>build/setup.lock
  flock -n 9 || { echo "another set-up is at work in this folder: waiting for it"; flock 9; }
fi
if compgen -e | grep -qE '^(COLAB_|KAGGLE_KERNEL_RUN_TYPE$|KAGGLE_URL_BASE$|KAGGLE_DATA_PROXY_TOKEN$)'; then
  python=${PYTHON:-python3}
  works "$python" pip || fail "$python ($("$python" -V 2>&1)) is not Python 3.10 to 3.13 with pip."
  "$python" -m helpers.install ${groups[@]+"${groups[@]}"}
elif [ -n "${PYTHON:-}" ] && "$PYTHON" -m helpers.install --check ${groups[@]+"${groups[@]}"} >/dev/null 2>&1; then
  python=$PYTHON
else
  make_venv
  python=$PWD/$venv/bin/python
  "$python" -m helpers.install --group run --group test
fi
exec 9>&- # the lock

case $mode in
  setup) echo "ready: $python" ;;
  run) exec "$python" -m helpers run "$@" ;;
  test) exec "$python" -m pytest -n auto --dist worksteal "$@" ;;
esac
