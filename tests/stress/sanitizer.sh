#!/usr/bin/env bash
# compute-sanitizer over the kernel's edge cases: memcheck, racecheck, initcheck, synccheck. Exit 0: all clean.
#   bash tests/stress/sanitizer.sh [tool ...]
# PYTHON: the interpreter (default: .venv's, else python3). COMPUTE_SANITIZER: the program (default: on PATH, from
# the package nvidia-cuda-sanitizer-api 13.5 or newer, or in CUDA's folder). The summary is sanitizer.txt in this
# card's folder under results/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-.venv/bin/python}"
[ -x "$(command -v "$python")" ] || python=python3
sanitizer="${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || true)}"
packaged="$("$python" -c 'import glob, sysconfig; print(*glob.glob(sysconfig.get_paths()["purelib"] + "/nvidia/*/compute-sanitizer"))')"
for folder in $packaged "${CUDA_HOME:-/usr/local/cuda}/bin" "${CUDA_HOME:-/usr/local/cuda}/compute-sanitizer"; do
  [ -n "$sanitizer" ] || { [ -x "$folder/compute-sanitizer" ] && sanitizer="$folder/compute-sanitizer"; } || true
done
if [ -z "$sanitizer" ]; then
  echo "compute-sanitizer was not found: pip install nvidia-cuda-sanitizer-api, or set COMPUTE_SANITIZER" >&2
  exit 2
fi

export PYTORCH_NO_CUDA_MEMORY_CACHING=1
"$python" tests/stress/sanitizer_cases.py  # compiles every variant into Triton's cache, and must be right by itself
out="$("$python" -c 'from helpers.machine import environment; print(environment.result_folder())')"
hash="$("$python" -c 'from helpers.record import hashes; print(hashes.kernel_hash())')"
mkdir -p "$out"
logs="$(mktemp -d)"
tools=("$@")
[ $# -gt 0 ] || tools=(memcheck racecheck initcheck synccheck)

codes=() pids=()
for tool in "${tools[@]}"; do
  # Only this kernel is watched: torch's own are not the subject, and would take minutes.
  "$sanitizer" --tool "$tool" --kernel-name kns=_your_dequantize_nf4_kernel --error-exitcode 9 --print-limit 5 \
    "$python" tests/stress/sanitizer_cases.py >"$logs/$tool" 2>&1 &
  pids+=($!)
done
for pid in "${pids[@]}"; do
  code=0
  wait "$pid" || code=$?
  codes+=("$code")
done

summary="$out/sanitizer.txt"
echo "compute-sanitizer over tests/stress/sanitizer_cases.py, kernel $hash, $(date -u +%Y-%m-%dT%H:%MZ)" >"$summary"
"$sanitizer" --version | tail -n 1 >>"$summary"
status=0
for i in "${!tools[@]}"; do
  log="$logs/${tools[$i]}"
  ran="$(grep 'launches of the edge cases' "$log" || echo 'did not finish')"
  said="$(grep 'SUMMARY' "$log" | tail -n 1 | sed 's/^=* *//' || true)"
  echo "${tools[$i]}: exit ${codes[$i]}; $ran; ${said:-no summary}" >>"$summary"
  if [ "${codes[$i]}" != 0 ] || [ "$ran" = 'did not finish' ]; then
    status=1
    head -n 60 "$log"
  fi
done
cat "$summary"
exit "$status"
