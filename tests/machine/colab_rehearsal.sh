#!/usr/bin/env bash
# Rehearse Google Colab without it: its Python, its packages, the notebook alone in an empty folder.
#
#   bash tests/machine/colab_rehearsal.sh [FOLDER]     FOLDER: where it works (default: a temporary folder)
#
# Takes the committed state of this repository. Needs Python 3.13 (PYTHON=..., python3.13 or pyenv's), the network,
# about 8 GB and some minutes: torch comes with its CUDA libraries where no CPU build of it can be had.
# Writes the summary to tests/machine/colab_rehearsal.log.md. For machines without a GPU: the kernel is interpreted.
set -euo pipefail
if nvidia-smi >/dev/null 2>&1; then echo "this rehearsal is for a machine without a GPU" >&2; exit 1; fi
unset CDPATH
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
work=${1:-$(mktemp -d)}
mkdir -p "$work"
work=$(cd "$work" && pwd)

freeze=(torch==2.11.0 triton==3.6.0 transformers==5.15.0 peft==0.20.0 accelerate==1.14.0 torchao==0.10.0
  datasets==4.0.0 numpy==2.1.3 pandas==2.2.3 matplotlib==3.10.0 huggingface_hub==1.27.0 ipython==7.34.0
  ipykernel==6.17.1 pytest==8.4.2)
tools=(nbclient nbformat tqdm) # Colab has these too; the public freeze's versions of them were not kept

if [ -z "${PYTHON:-}" ]; then
  for PYTHON in python3.13 "$HOME"/.pyenv/versions/3.13*/bin/python; do
    if "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 13))' 2>/dev/null; then break; fi
    PYTHON=
  done
fi
[ -n "$PYTHON" ] || { echo "no Python 3.13 found: set PYTHON=/path/to/python3.13" >&2; exit 1; }

# A new environment every time: only so a second rehearsal proves anything.
rm -rf "$work/venv" "$work/content" "$work/origin"
"$PYTHON" -m venv "$work/venv"
python=$work/venv/bin/python
echo "installing Colab's packages into $work/venv ..."
"$python" -m pip --isolated install -qqq --timeout 10 --retries 1 --index-url https://download.pytorch.org/whl/cpu \
  torch==2.11.0 || echo "no CPU build of torch 2.11.0 to be had: taking the build with CUDA"
"$python" -m pip install -qq "${freeze[@]}" "${tools[@]}"

git clone -q --no-hardlinks "$root" "$work/origin"
mkdir -p "$work/content"
cp "$work/origin/Unsloth_Puzzles_A.ipynb" "$work/content/"

env -u PYTHON -u PYTHONPATH -u VIRTUAL_ENV -u TRITON_INTERPRET -u NF4_ALLOW_CPU \
  PATH="$work/venv/bin:$PATH" COLAB_RELEASE_TAG=rehearsal COLAB_GPU=0 \
  PYDEVD_DISABLE_FILE_VALIDATION=1 \
  "$python" - "$work" "$root/tests/machine/colab_rehearsal.log.md" <<'PYTHON'
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

work, log = Path(sys.argv[1]), Path(sys.argv[2])
content = work / "content"
lines, failed = [], []


def versions():
    installed = {}
    for item in importlib.metadata.distributions():
        installed.setdefault(item.metadata["Name"].lower(), item.version)
    return installed


def note(ok, text):
    lines.append(f"| {'yes' if ok else '**NO**'} | {text} |")
    print("ok  " if ok else "FAIL", text, flush=True)
    failed.extend([] if ok else [text])


def texts(notebook):
    return "".join(
        output.get("text", "") + "".join(output.get("traceback", [])) + str(output.get("evalue", ""))
        for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )


def execute(first_only=False, address=""):
    """(seconds, text of all outputs, error or None) of the notebook that lies alone in the content folder.

    address: what its REPO_URL would say once the repository is public.
    """
    notebook = nbformat.read(content / "Unsloth_Puzzles_A.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs = []
        cell.source = re.sub(r'^REPO_URL = ""', f'REPO_URL = "{address}"', cell.source, flags=re.M)
    if first_only:
        notebook.cells = code[:1]
    where = {"metadata": {"path": str(content)}}
    client = NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=where)
    start, error = time.monotonic(), None
    try:
        client.execute()
    except CellExecutionError as raised:
        error = re.sub(r"\x1b\[[0-9;]*m", "", str(raised))
        print(error[-3000:])
    seconds = time.monotonic() - start
    kept = work / f"executed-{'first' if first_only else 'cloned' if address else 'alone'}.ipynb"
    nbformat.write(notebook, kept)
    return seconds, re.sub(r"\x1b\[[0-9;]*m", "", texts(notebook)), error


def changes(old, new):
    return {name: (version, new.get(name)) for name, version in old.items() if new.get(name) != version}


before = versions()
seconds, shown, error = execute(first_only=True)
after = versions()
added = sorted(f"{name} {version}" for name, version in after.items() if name not in before)
note(error is None and "No GPU here" in shown, f"without a GPU the install cell says so and goes on ({seconds:.0f} s)")
note(not {"torch", "triton"} & changes(before, after).keys(), "torch and triton keep their versions")
note(not changes(before, after),
     f"nothing that was there is replaced, downgraded or removed (changed: {changes(before, after) or 'none'})")

seconds, shown, error = execute(first_only=True)
note(error is None and "installing" not in shown and versions() == after,
     f"a second run of the install cell installs nothing ({seconds:.0f} s)")

seconds, shown, error = execute()
note(error is None, f"all cells run, the notebook alone ({seconds:.0f} s, Triton's interpreter)")
note("No repository of this notebook here" in shown, "what needs the repository says so and is skipped")
note(versions() == after, "running the notebook installs nothing more")

os.environ["NF4_ALLOW_CPU"] = "1"
seconds, shown, error = execute(address=work / "origin")
note(error is None and "repository: " in shown, f"all cells run with the repository cloned ({seconds:.0f} s)")
cloned = versions()
note(not changes(after, cloned), f"the clone brings {', '.join(sorted(cloned.keys() - after.keys())) or 'nothing'}; nothing else changes")

# What the install cell would add beside a GPU: a stand-in for nvidia-smi makes it try.
smi = work / "smi" / "nvidia-smi"
smi.parent.mkdir(exist_ok=True)
smi.write_text("#!/bin/sh\ncase \"$*\" in *driver*) echo 580.0 ;; *) echo 'Tesla T4, 7.5' ;; esac\n")
smi.chmod(0o755)
os.environ["PATH"] = f"{smi.parent}:{os.environ['PATH']}"
seconds, shown, error = execute(first_only=True)
note(error is None and "No GPU that torch can use" in shown,
     "a GPU that torch cannot use is reported (nvidia-smi is a stand-in here)")
with_unsloth = versions()
more = sorted(f"{name} {version}" for name, version in with_unsloth.items() if name not in cloned)
note("unsloth" in with_unsloth and not changes(cloned, with_unsloth),
     f"beside a GPU the install cell also adds {', '.join(more)}; nothing else changes ({seconds:.0f} s)")
script = "import unsloth, trl, peft; from unsloth.kernels.utils import fast_dequantize"
done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True,
                      text=True, cwd=work)
note(done.returncode == 0, "Unsloth imports among Colab's versions (on its CPU path)")
if done.returncode:
    print(done.stderr[-3000:])

main = ("torch", "triton", "transformers", "peft", "torchao", "datasets", "ipython", "ipykernel", "bitsandbytes")
commit = subprocess.run(["git", "-C", str(work / "origin"), "rev-parse", "--short", "HEAD"],
                        capture_output=True, text=True, check=True).stdout.strip()
log.write_text("\n".join([
    "# Colab rehearsal",
    "",
    f"`bash tests/machine/colab_rehearsal.sh` on {datetime.date.today()}, commit {commit}: "
    + (f"{len(failed)} of {len(lines)} assertions failed." if failed else f"all {len(lines)} assertions hold."),
    "",
    f"Python {platform.python_version()}, no GPU (the kernel runs in Triton's interpreter), COLAB_ variables set, "
    "the notebook alone in an empty folder.",
    "",
    "Versions: " + ", ".join(f"{name} {after.get(name, 'absent')}" for name in main) + ".",
    f"Added by the install cell: {', '.join(added) or 'nothing'}.",
    "",
    "| holds | assertion |",
    "|---|---|",
    *lines,
    "",
    "Not covered: a GPU, and Colab's own front end.",
    "",
]))
print(f"\nsummary: {log}")
sys.exit(bool(failed))
PYTHON
