"""python -m helpers bench: the kernel against every baseline and against the ceiling of the card at hand.

All candidates take turns in one process; nothing is timed before its result has bitsandbytes' bits. A full
run is written to results/<gpu>/benchmark.json; tables and figures are drawn from that file alone.
"""

import argparse
import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from tqdm import tqdm

from helpers import machine
from helpers.bench import byte_mover, compiled, first_call, gpu_time, host_time
from helpers.bench.contenders import FULL, QUICK, Bench, why
from helpers.nf4 import kernel as nf4_kernel
from helpers.results import goals, store as results, tables
from helpers.results.store import Benchmark, Protocol, Result
from helpers.puzzle import protocol as official

NAME = "benchmark"  # of the result file


def protocol(bench: Bench) -> Protocol:
    """Seconds of the official protocol for the kernel and every baseline."""
    candidates, configs = {"kernel": bench.module.your_dequantize_nf4}, bench.scope.configs
    turns = 5 * len(configs) * len(bench.contenders())
    with tqdm(total=turns, desc="protocol", leave=False, disable=None) as bar:
        comparison = official.compare(candidates, configs=configs, against=bench.baselines, tick=bar.update)
    return msgspec.convert(comparison.to_dict(), Protocol)


SECTIONS: dict[str, Callable[[Bench], object]] = {
    "host": host_time.host,
    "call_cost": host_time.call_cost,
    "protocol": protocol,
    "byte_mover": byte_mover.byte_mover,
    "gpu": gpu_time.gpu,
    "gemm": gpu_time.gemm,
    "ablation": gpu_time.ablation,
    "compile": compiled.compile,
    "cold": first_call.cold,
    "compiles": first_call.compiles,
}
# What --quick measures unless --only says otherwise: the others compile a lot.
QUICK_SECTIONS = ("host", "call_cost", "protocol", "byte_mover", "gpu", "gemm", "cold")


def failures(data) -> list[str]:
    """Every reason recorded under "failed", "failures" or "failure", anywhere in a result."""
    if isinstance(data, list):
        return [reason for item in data for reason in failures(item)]
    if not isinstance(data, dict):
        return []
    reasons = {**data.get("failed", {}), **data.get("failures", {})}
    if data.get("failure"):
        reasons[data["label"]] = data["failure"]
    return [f"{name}: {reason}" for name, reason in reasons.items()] + failures(list(data.values()))


def measure(only: list[str] | None = None, quick: bool = False, module=nf4_kernel, keep=None) -> Benchmark:
    """The sections' data (all by default); a section that cannot run leaves its reason.

    module: what holds the kernel; a live notebook hands in its own functions. keep(data): after each section.
    """
    chosen = list(only or (QUICK_SECTIONS if quick else SECTIONS))
    data = Benchmark(quick=quick)
    if not machine.has_gpu():
        data.not_measured = dict.fromkeys(only or SECTIONS, f"needs {official.NEEDS_GPU}")
        return data
    bench = Bench(module, official.baselines(), quick, QUICK if quick else FULL)
    if reason := bench.baselines["bitsandbytes"].reason:
        data.not_measured = dict.fromkeys(chosen, f"needs bitsandbytes, whose bits all must have: {reason}")
        return data
    with tqdm(chosen, desc="bench", disable=None) as bar:
        for name in bar:
            bar.set_postfix_str(name)
            try:
                setattr(data, name, SECTIONS[name](bench))
            except Exception as error:
                traceback.print_exc()
                data.failed[name] = why(error)
            torch.cuda.empty_cache()
            # Unsloth takes its classic path for good once its fused kernel fails: then "today" is not today.
            data.unsloth_fused = getattr(sys.modules.get("unsloth.kernels.utils"), "_USE_NF4_KERNELS", None)
            if keep:
                keep(data)
    return data


def merge(files: list[Path]) -> Result[Benchmark]:
    """One full result of files that hold some sections each (`bench --only SECTION --json FILE`).

    They must be of the same kernel, card and versions, else ValueError. Its date is the first one's.
    """
    parts = {path: results.read(path.name, path.parent, Benchmark) for path in files}
    first, sections = parts[files[0]], {}
    for path, part in parts.items():
        facts = msgspec.structs.replace(part.environment, date=first.environment.date)
        if (facts, part.kernel, part.data.quick) != (first.environment, first.kernel, False):
            raise ValueError(f"{path} is quick, or of another kernel, card or versions than {files[0]}")
        held = {name: data for name in SECTIONS if (data := getattr(part.data, name)) is not None}
        if twice := held.keys() & sections.keys():
            raise ValueError(f"{path} holds {', '.join(twice)} once more, expected every section once")
        sections |= held
    if missing := [name for name in SECTIONS if name not in sections]:
        raise ValueError(f"the files lack {', '.join(missing)}, expected every section once")
    fused = all(part.data.unsloth_fused for part in parts.values())
    return msgspec.structs.replace(first, data=Benchmark(quick=False, unsloth_fused=fused, **sections))


def _store(data: Benchmark, options) -> Path | None:
    """Where the data was written; None where it stays unwritten.

    By itself a run of all sections is stored, a quick one only where the card has no full one yet.
    """
    if options.json:
        return results.write(options.json.name, data, options.json.parent, Benchmark)
    known = results.find(NAME, machine.result_folder())
    if options.only or data.not_measured or options.quick and known and not known.data.quick:
        return None
    return results.write(NAME, data)


def main(argv: list[str] | None = None) -> int:
    """Measure, write the result file, print the table of goals. 1 when something failed, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m helpers bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer sizes and rounds; never replaces a full run")
    add("--json", type=Path, metavar="FILE", help="write the result here, after each section")
    add("--only", nargs="+", choices=list(SECTIONS), help="these sections alone")
    add("--merge", nargs="+", type=Path, metavar="FILE", help="store such files as one result")
    options = parser.parse_args(argv)
    if options.merge:
        path = options.json or machine.result_folder() / f"{NAME}.json"
        try:
            print("written:", results.save(path.name, merge(options.merge), path.parent))
        except ValueError as error:
            parser.error(str(error))
        return 0
    keep = functools.partial(_store, options=options) if options.json else None
    data = measure(options.only, options.quick, keep=keep)
    for name, reason in data.not_measured.items():
        print(f"{name}: not measured ({reason})")
    if path := _store(data, options):
        print("written:", path)
    if not data.not_measured:
        print(tables.summary(data), tables.text(goals.table(data)), sep="\n\n")
    problems = failures(msgspec.to_builtins(data))
    for problem in problems:
        print("FAILED", problem)
    return 1 if problems else 0
