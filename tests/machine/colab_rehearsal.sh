#!/usr/bin/env bash
# Rehearse Google Colab: its Python and packages, the committed notebook alone in an empty folder, no GPU.
#
#   bash tests/machine/colab_rehearsal.sh [FOLDER]     FOLDER: where it works (default: a temporary folder)
#
# Needs Python 3.13 (PYTHON=..., python3.13 or pyenv's), the network, about 8 GB and some minutes.
set -euo pipefail
if nvidia-smi >/dev/null 2>&1; then echo "this rehearsal is for a machine without a GPU" >&2; exit 1; fi
unset CDPATH
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
work=$(mkdir -p "${1:-/tmp}" && cd "${1:-$(mktemp -d)}" && pwd)

# The public freeze of 2026-08-19; the versions of the last three are not in it.
freeze=(torch==2.11.0 triton==3.6.0 transformers==5.15.0 peft==0.20.0 accelerate==1.14.0 torchao==0.10.0
  datasets==4.0.0 numpy==2.1.3 pandas==2.2.3 matplotlib==3.10.0 huggingface_hub==1.27.0 ipython==7.34.0
  ipykernel==6.17.1 pytest==8.4.2 nbclient nbformat tqdm)
for python in ${PYTHON:-python3.13 "$HOME"/.pyenv/versions/3.13*/bin/python ""}; do
  if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 13))' 2>/dev/null; then break; fi
done
[ -n "$python" ] || { echo "no Python 3.13 found: set PYTHON=/path/to/python3.13" >&2; exit 1; }
rm -rf "$work/venv" "$work/content"
"$python" -m venv "$work/venv"
python=$work/venv/bin/python
echo "installing Colab's packages into $work/venv ..."
"$python" -m pip --isolated install -qqq --timeout 10 --retries 1 --index-url https://download.pytorch.org/whl/cpu \
  torch==2.11.0 || echo "no CPU build of torch 2.11.0 to be had: taking the build with CUDA"
"$python" -m pip install -qq "${freeze[@]}"
mkdir "$work/content"
git -C "$root" show HEAD:Unsloth_Puzzles_A.ipynb >"$work/content/Unsloth_Puzzles_A.ipynb"

env -u PYTHON -u PYTHONPATH -u VIRTUAL_ENV -u TRITON_INTERPRET PATH="$work/venv/bin:$PATH" \
  COLAB_RELEASE_TAG=rehearsal COLAB_GPU=0 PYDEVD_DISABLE_FILE_VALIDATION=1 \
  "$python" - "$work" <<'PYTHON'
import importlib.metadata, os, re, subprocess, sys, time
from pathlib import Path
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

work = Path(sys.argv[1])
content, results = work / "content", []


def versions():
    return {d.metadata["Name"].lower(): d.version for d in reversed(list(importlib.metadata.distributions()))}


def note(holds, text):
    results.append(bool(holds))
    print("ok  " if holds else "FAIL", text, flush=True)


def execute(until=None):
    """(seconds, text of all outputs, whether it ran) of the notebook, or of its cells up to the one named."""
    notebook = nbformat.read(content / "Unsloth_Puzzles_A.ipynb", as_version=4)
    if until:
        notebook.cells = notebook.cells[: [cell.id for cell in notebook.cells].index(until) + 1]
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.outputs = []
    client = NotebookClient(notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(content)}})
    start, ran = time.monotonic(), True
    try:
        client.execute()
    except CellExecutionError as error:
        ran = False
        print(re.sub(r"\x1b\[[0-9;]*m", "", str(error))[-3000:])
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return time.monotonic() - start, "".join(str(output.get("text", "")) for output in outputs), ran


def changes(old, new):
    return {name: (version, new.get(name)) for name, version in old.items() if new.get(name) != version}


before = versions()
seconds, shown, ran = execute("machine")
after = versions()
added = ", ".join(f"{name} {version}" for name, version in sorted(after.items()) if name not in before)
note(ran and "No GPU:" in shown, f"without a GPU the notebook says so and goes on ({seconds:.0f} s)")
note(not changes(before, after), f"it changes nothing that was there ({changes(before, after)}), and adds {added}")
seconds, shown, ran = execute()
note(ran and "installing" not in shown, f"the whole notebook runs alone, in Triton's interpreter ({seconds:.0f} s)")
note(versions() == after, "a second run of the install cell and the rest install nothing")

# What the install cell adds beside a GPU: a stand-in for nvidia-smi makes it try.
smi = work / "smi" / "nvidia-smi"
smi.parent.mkdir(exist_ok=True)
smi.write_text("#!/bin/sh\necho 580.0\n")
smi.chmod(0o755)
os.environ["PATH"] = f"{smi.parent}:{os.environ['PATH']}"
seconds, shown, ran = execute("machine")
more = ", ".join(f"{name} {version}" for name, version in sorted(versions().items()) if name not in after)
note(ran and "No GPU:" in shown, "with a GPU that torch cannot use the interpreter runs the kernel")
note("unsloth" in more and not changes(after, versions()), f"with a GPU it also adds {more}; nothing else changes")
script = "import unsloth, trl, peft; from unsloth.kernels.utils import fast_dequantize"
done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"HF_HUB_OFFLINE": "1"}, cwd=work)
note(done.returncode == 0, "Unsloth imports among Colab's versions (on its CPU path)")

sys.exit(f"{results.count(False)} of {len(results)} assertions failed" if False in results else 0)
PYTHON
