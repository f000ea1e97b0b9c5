"""python -m helpers.training.several_gpus: QLoRA under DDP and FSDP with the kernel and without, on every GPU here.

Runs examples/finetune_many_gpus.py with --compare for each engine, on a small random Llama, and stores what
the processes found in results/<gpu>/several_gpus.json.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers.machine import environment
from helpers.measure import clocks
from helpers.record import results
from helpers.training import tiny_models, tiny_training

ENGINES = {"DDP": (), "FSDP 1": ("--fsdp", "1"), "FSDP 2": ("--fsdp", "2")}
MODEL = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4)
TURN = 5  # steps between two switches
WARM_UP = 2  # turns that are not timed
SETTLE = 2  # steps of each turn that are not timed: a switch leaves the caches of Python and of the CPU cold


def train(model: str, processes: int, options, folder: Path) -> list[dict]:
    """One engine in processes of its own; what each of them found. Raises RuntimeError with their output."""
    out = folder / "found.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(processes),
    ]
    command += [
        "-m",
        "examples.finetune_many_gpus",
        "--model",
        model,
        "--compare",
        "--turn",
        str(TURN),
        "--json",
        str(out),
        *options,
    ]
    path = os.pathsep.join([str(environment.ROOT), *sys.path])
    variables = os.environ | tiny_training.OFFLINE | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])
    return [json.loads(Path(f"{out}.{rank}").read_text(encoding="utf-8")) for rank in range(processes)]


def summary(found: list[dict]) -> dict:
    """Step times and whether all runs of all processes had the same losses, from what each process found.

    Times are those of the run in turns, p20, p50 and p80: a step takes as long as its slowest process, a turn
    as its median step. The speedup is the ratio of neighbouring turns, half of which have the kernel first.
    """
    seconds = [max(each) for each in zip(*(one["in turns"]["seconds"] for one in found), strict=True)]
    steps = zip(found[0]["in turns"]["kernel"], seconds, strict=True)
    turns = [
        (kernel, statistics.median([second for _, second in list(turn)[SETTLE:]]))
        for kernel, turn in itertools.groupby(steps, lambda step: step[0])
    ][WARM_UP:]
    pairs = [dict(pair) for pair in itertools.pairwise(turns)]
    expected = found[0]["without"]["losses"]
    return {
        "processes": len(found),
        "devices": [one["with"]["device"] for one in found],
        "steps": len(expected),
        "step_ms": {
            name: clocks.percentiles([1e3 * second for kernel, second in turns if kernel == wanted])
            for name, wanted in (("without", False), ("with", True))
        },
        "pairs": len(pairs),
        "speedup": clocks.percentiles([pair[False] / pair[True] for pair in pairs]),
        "same_losses": all(one[name]["losses"] == expected for one in found for name in one),
        "decoded_by_the_kernel": [one["with"]["decoded"] for one in found],
    }


def line(engine: str, row: dict) -> str:
    """One engine in a sentence."""
    if "failed" in row:
        return f"{engine}: failed: {row['failed']}"
    without, with_ = (row["step_ms"][name]["p50"] for name in ("without", "with"))
    speed, same = row["speedup"], "identical" if row["same_losses"] else "DIFFER"
    return (
        f"{engine} on {', '.join(row['devices'])}: {without:.1f} -> {with_:.1f} ms a step "
        f"({speed['p50']:.2f}x, {speed['p20']:.2f} to {speed['p80']:.2f}), "
        f"losses {same} over {row['steps']} steps, "
        f"decoded by the kernel: {row['decoded_by_the_kernel']}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m helpers.training.several_gpus", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--steps", type=int, default=95, help="steps of each run (default 95)")
    arguments = parser.parse_args(argv)
    least = (WARM_UP + 2) * TURN  # a turn of each to compare
    if arguments.steps < least or arguments.steps % TURN:
        parser.error(f"--steps is {arguments.steps}, expected a multiple of {TURN} from {least} on")
    import torch

    count = torch.cuda.device_count() if environment.has_gpu() else 0
    if count < 2:
        print(f"not measured (needs two GPUs, this machine has {count})")
        return 2
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny_models.make(Path(folder, "model"), **MODEL))
        for engine, options in ENGINES.items():
            try:
                rows[engine] = summary(
                    train(model, count, (*options, "--steps", str(arguments.steps)), Path(folder))
                )
            except (RuntimeError, subprocess.SubprocessError) as error:
                rows[engine] = {"failed": str(error)}
            print(line(engine, rows[engine]), flush=True)
    print(f"written: {results.write('several_gpus', {'model': MODEL, 'engines': rows})}")
    return int(any("failed" in row or not row["same_losses"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
