"""QLoRA under DDP and FSDP with the kernel and without, on every GPU here.

`python -m helpers several-gpus` trains a small random Llama three times per engine: without the kernel, with
it, and in turns of some steps, which is the fair way to compare times. A summary of what the processes report
is stored in results/<gpu>/several_gpus.json.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import msgspec

from helpers.machine import child, environment
from helpers.record import results
from helpers.training import runs, tiny_models

ENGINES = {"DDP": 0, "FSDP 1": 1, "FSDP 2": 2}  # the version of FSDP
MODEL = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4)
ROWS, LENGTH = 4, 128  # of a step in each process
TURN = 5  # steps between two switches
WARM_UP = 2  # turns that are not timed
SETTLE = 2  # steps of each turn that are not timed: a switch leaves the caches of Python and of the CPU cold


def worker(model: str, fsdp: int, steps: int, rows: int, length: int, turn: int) -> tuple[int, dict]:
    """(rank, report) of one process: the three runs by name."""
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = None
    if fsdp:
        first = fsdp == 1
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=fsdp,
            use_orig_params=False if first else None,
            cpu_ram_efficient_loading=False,
            sync_module_states=False if first else None,
        )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
    turns = {"without": [False], "with": [True], "in turns": [False] * turn + [True] * turn}
    batches = tiny_models.batches(model, steps, rows * accelerator.num_processes, length)
    with runs.deterministic():
        report = {name: train(accelerator, model, fsdp, batches, kernel) for name, kernel in turns.items()}
    rank = accelerator.process_index
    accelerator.end_training()
    return rank, report


def train(accelerator, model: str, fsdp: int, batches: list, turns: list[bool]) -> dict:
    """Of each step the losses of all processes, its seconds, whether with the kernel; and decodes by it here.

    turns: for each step, over and over, whether with the kernel.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.utils.other import fsdp_auto_wrap_policy

    from helpers.nf4.integrate import use_nf4_kernel

    torch.manual_seed(3407)
    # FSDP shards floating point only: it keeps the packed bytes as bfloat16.
    storage = torch.bfloat16 if fsdp else torch.uint8
    loaded = tiny_models.load(model, torch.bfloat16, accelerator.device, storage)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(loaded, config, autocast_adapter_dtype=False).train()
    if fsdp:
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(adapted)
    if fsdp == 1:  # the optimizer must see the sharded parameters
        adapted = accelerator.prepare(adapted)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-4)
    if fsdp == 1:
        optimizer = accelerator.prepare(optimizer)
    else:
        adapted, optimizer = accelerator.prepare(adapted, optimizer)
    report = {"losses": [], "seconds": [], "kernel": [], "decoded": 0, "device": str(accelerator.device)}
    steps = zip(itertools.cycle(turns), batches)
    for kernel, turn in itertools.groupby(steps, lambda step: step[0]):
        with use_nf4_kernel("peft", quiet=True) if kernel else contextlib.nullcontext() as switch:
            for _, ids in turn:
                ids = ids[accelerator.process_index :: accelerator.num_processes].to(accelerator.device)
                start = time.perf_counter()
                loss = adapted(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                report["losses"].append(accelerator.gather(loss.detach().reshape(1)).tolist())
                report["seconds"].append(time.perf_counter() - start)
                report["kernel"].append(kernel)
            report["decoded"] += sum(site["kernel"] for site in switch.counts().values()) if switch else 0
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    return report


def launch(model: str, processes: int, fsdp: int, steps: int, *options, timeout: float = 300) -> list[dict]:
    """One engine in processes of its own; the report of each. Raises ChildFailed with their output."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
        command += ["-m", "helpers", "several-gpus", "--worker", folder, "--model", model]
        command += ["--fsdp", fsdp, "--steps", steps, *options]
        child.python(command, folder=folder, variables=runs.VARIABLES, timeout=timeout)
        files = [Path(folder, f"{rank}.json") for rank in range(processes)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def summary(reports: list[dict]) -> results.Engine:
    """Step times and whether all runs of all processes had the same losses, from the processes' reports.

    Times are those of the run in turns, p20, p50 and p80: a step takes as long as its slowest process, a turn
    as its median step. The speedup is the ratio of neighbouring turns, half of which have the kernel first.
    """
    from helpers.measure import clocks

    def spread(values):
        return results.Spread(**clocks.percentiles(values))

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
        devices=[one["with"]["device"] for one in reports],
        steps=len(expected),
        step_ms={
            name: spread([1e3 * second for kernel, second in turns if kernel == (name == "with")])
            for name in ("without", "with")
        },
        pairs=len(pairs),
        speedup=spread([pair[False] / pair[True] for pair in pairs]),
        same_losses=all(one[name]["losses"] == expected for one in reports for name in one),
        decoded_by_the_kernel=[one["with"]["decoded"] for one in reports],
    )


def line(engine: str, row: results.Engine) -> str:
    """One engine in a sentence."""
    if row.failed:
        return f"{engine}: failed: {row.failed}"
    without, with_, speed = row.step_ms["without"].p50, row.step_ms["with"].p50, row.speedup
    return (
        f"{engine} on {', '.join(row.devices)}: {without:.1f} -> {with_:.1f} ms per step "
        f"({speed.p50:.2f}x, {speed.p20:.2f} to {speed.p80:.2f}), "
        f"losses {'identical' if row.same_losses else 'DIFFER'} over {row.steps} steps, "
        f"decoded by the kernel: {row.decoded_by_the_kernel}"
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=95, help="steps of each run (default 95)")
    for name, default in (("rows", ROWS), ("length", LENGTH), ("turn", TURN), ("fsdp", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help=argparse.SUPPRESS)
    for name in ("worker", "model"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        sizes = arguments.steps, arguments.rows, arguments.length, arguments.turn
        rank, report = worker(arguments.model, arguments.fsdp, *sizes)
        Path(arguments.worker, f"{rank}.json").write_text(json.dumps(report), encoding="utf-8")
        return 0
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
        model = str(tiny_models.make(folder, **MODEL))
        for engine, fsdp in ENGINES.items():
            try:
                rows[engine] = summary(launch(model, count, fsdp, arguments.steps))
            except child.ChildFailed as error:
                rows[engine] = results.Engine(failed=str(error))
            print(line(engine, rows[engine]), flush=True)
    data = results.SeveralGpus(model=MODEL, engines=rows)
    print(f"written: {results.write('several_gpus', msgspec.to_builtins(data))}")
    return int(any(row.failed or not row.same_losses for row in rows.values()))
