"""QLoRA under DDP and FSDP with the kernel and without, on every GPU here.

`python -m helpers several-gpus` runs the script that users copy, examples/finetune_many_gpus.py: it trains a
small random Llama three times per engine, without the kernel, with it, and in turns of some steps, which is
the fair way to compare times. A summary of its records is stored in results/<gpu>/several_gpus.json.
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import tempfile
from pathlib import Path

from helpers import machine
from helpers.results import store as results, tables
from helpers.training import runs, tiny_models

ENGINES = {"DDP": [], "FSDP 1": ["--fsdp", 1], "FSDP 2": ["--fsdp", 2]}
MODEL = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4)
TURN = 5  # steps between two switches
WARM_UP = 2  # turns that are not timed
SETTLE = 2  # steps of each turn that are not timed: a switch leaves the caches of Python and of the CPU cold


def launch(processes: int, *options) -> list[dict]:
    """The records of the example's processes. Raises ChildFailed with their output."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
        command += [machine.ROOT / "examples" / "finetune_many_gpus.py", "--compare", *options]
        command += ["--json", Path(folder, "records")]
        machine.python(command, variables=runs.VARIABLES)
        files = [Path(folder, f"records.{rank}") for rank in range(processes)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def summary(reports: list[dict]) -> results.Engine:
    """Step times and whether all runs of all processes had the same losses, from the processes' reports.

    Times are those of the run in turns, p20, p50 and p80: a step takes as long as its slowest process, a turn
    as its median step. The speedup is the ratio of neighbouring turns, half of which have the kernel first.
    """

    def spread(values):
        return results.Spread(**results.percentiles(values))

    seconds = [max(each) for each in zip(*(one["in turns"]["seconds"] for one in reports), strict=True)]
    steps = zip(reports[0]["in turns"]["kernel"], seconds, strict=True)
    turns = [
        (kernel, statistics.median([second for _, second in list(turn)[SETTLE:]]))
        for kernel, turn in itertools.groupby(steps, lambda step: step[0])
    ][WARM_UP:]
    pairs = [dict(pair) for pair in itertools.pairwise(turns)]
    expected = reports[0]["without"]["losses"]
    return results.Engine(
        processes=len(reports),
        steps=len(expected),
        step_ms={
            name: spread([1e3 * second for kernel, second in turns if kernel == (name == "with")])
            for name in ("without", "with")
        },
        speedup=spread([pair[False] / pair[True] for pair in pairs]),
        same_losses=all(one[name]["losses"] == expected for one in reports for name in one),
        decoded_by_the_kernel=[one["with"]["decoded"] for one in reports],
    )


def table(data: results.SeveralGpus) -> tables.Table:
    """One row an engine."""
    rows = [["engine", "GPUs", "ms per step without", "with", "speedup (p20 to p80)", "losses"]]
    for engine, run in data.engines.items():
        cells = ["failed", "", "", "", run.failed.strip().rpartition("\n")[2]]
        if not run.failed:
            times = [f"{run.step_ms[arm].p50:.1f}" for arm in ("without", "with")]
            speed = f"{run.speedup.p50:.2f} ({run.speedup.p20:.2f} to {run.speedup.p80:.2f})"
            same = f"{'identical' if run.same_losses else 'DIFFER'}, {run.steps} steps"
            cells = [str(run.processes), *times, speed, same]
        rows.append([engine, *cells])
    return rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=95, help="steps of each run (default 95)")
    steps = parser.parse_args(argv).steps
    least = (WARM_UP + 2) * TURN  # a turn of each to compare
    if steps < least or steps % TURN:
        parser.error(f"--steps is {steps}, expected a multiple of {TURN} from {least} on")
    if importlib.util.find_spec("nf4_triton"):
        parser.error("the installed nf4_triton would be measured, not this checkout: uninstall it first")
    import torch

    count = torch.cuda.device_count() if machine.has_gpu() else 0
    if count < 2:
        print(f"not measured (needs two GPUs, this machine has {count})")
        return 2
    data = results.SeveralGpus(model=MODEL, engines={})
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.make(folder, **MODEL)
        for engine, options in ENGINES.items():
            try:
                records = launch(count, *options, "--model", model, "--steps", steps, "--turn", TURN)
                data.engines[engine] = row = summary(records)
                print(f"{engine}: decoded by the kernel in each process: {row.decoded_by_the_kernel}")
            except machine.ChildFailed as error:
                print(f"{engine}: {error}")
                data.engines[engine] = results.Engine(failed=str(error))
            path = results.write("several_gpus", data)  # a run cut short keeps what it has
            print(f"{tables.text(table(data))}\n", flush=True)
    print(f"written: {path}")
    return int(any(run.failed or not run.same_losses for run in data.engines.values()))
