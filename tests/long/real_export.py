"""Time the export of a random 4-bit model of Llama-3-8B's shapes with an adapter beside `cp` of its result.

    PYTHONPATH=. python tests/long/real_export.py FOLDER

A pair is export + sync, then cp + sync. FOLDER gets 6 GB, and 32 more during a pair.
"""

import functools
import shutil
import subprocess
import sys
import time
from pathlib import Path

from helpers.bench import training
from nf4_triton import export_checkpoint

PAIRS = 3


def make(folder):
    """Write the model and its adapter."""
    model = training.peft_model(training.WHOLE_LLAMA3_8B)
    model.save_pretrained(folder / "adapter")
    model.unload().save_pretrained(folder / "model")


def seconds(call, *arguments):
    """Return the seconds until all that a call writes is on the disk."""
    subprocess.run(["sync"], check=True)
    start = time.perf_counter()
    call(*arguments)
    subprocess.run(["sync"], check=True)
    return time.perf_counter() - start


def main(folder):
    model, adapter, out, copy = (folder / name for name in ("model", "adapter", "out", "copy"))
    if not folder.exists():
        make(folder)
    for _ in range(PAIRS):
        export = seconds(functools.partial(export_checkpoint, base=model), adapter, out)
        size = sum(file.stat().st_size for file in out.iterdir()) / 1e9
        cp = seconds(subprocess.run, ["cp", "-r", "--reflink=never", out, copy])
        print(f"{size:.2f} GB: export {export:.2f} s, cp {cp:.2f} s: {export / cp:.2f}", flush=True)
        shutil.rmtree(out)
        shutil.rmtree(copy)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
