#!/usr/bin/env bash
# bitsandbytes' own functional and Linear4bit 4-bit tests, with this kernel in place of its dequantization.
#   bash tests/stress/bitsandbytes_own.sh [FOLDER] [pytest arguments]
# FOLDER: bitsandbytes' source, or any folder that holds its `tests`. Without one, the source distribution of the
# installed version is fetched from the package registry into build/, where it exists there; else clone the project's
# repository at that version's tag and give its folder. PYTHON: the interpreter (default: .venv's, else python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-.venv/bin/python}"
[ -x "$(command -v "$python")" ] || python=python3
if [ $# -gt 0 ] && [ -d "$1" ]; then
  folder="$1"
  shift
else
  version="$("$python" -c 'from importlib.metadata import version; print(version("bitsandbytes"))')"
  folder="build/bitsandbytes-$version"
  if [ ! -d "$folder/tests" ]; then
    mkdir -p build
    "$python" -m pip download --quiet --no-deps --no-build-isolation --no-binary bitsandbytes \
      "bitsandbytes==$version" -d build || {
      echo "the registry has no source distribution of bitsandbytes $version: clone its repository at tag $version" \
        "and run: bash tests/stress/bitsandbytes_own.sh FOLDER" >&2
      exit 2
    }
    tar xzf "build/bitsandbytes-$version.tar.gz" -C build
  fi
fi
exec "$python" tests/stress/bitsandbytes_own.py "$folder" "$@"
