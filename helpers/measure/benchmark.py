"""python -m helpers bench: the kernel against every baseline and against the ceilings of the card at hand.

All candidates run interleaved in one process; nothing is timed before its result has bitsandbytes' bits.
A full run is written to results/<gpu>/benchmark.json; figures and tables are drawn from that file only.
"""

import argparse
import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from helpers.nf4 import kernel as nf4_kernel
from helpers.machine import environment
from helpers.measure import first_call
from helpers.oracle import baselines
from helpers.record import results, tables
from helpers.show import plots
from helpers.submission import harness
from helpers.measure.contenders import DTYPES, Bench, why
from helpers.measure.gpu_time import ablation, gemm, gpu
from helpers.measure.host_time import host
from helpers.record.goals import table, targets
from helpers.measure.clocks import time_interleaved

__all__ = ["SECTIONS", "main", "measure", "targets", "time_interleaved"]

NAME = "benchmark"  # of the result file
NEEDS_GPU = "needs an NVIDIA GPU"


def protocol(bench: Bench) -> dict:
    """Seconds of the official protocol for the kernel and every baseline, interleaved."""
    repeats, kernel = bench.rounds(5, 1), {"kernel": bench.module.your_dequantize_nf4}
    contestants = sum(baseline.fn is not None for baseline in bench.found.values()) + 1
    with bench.bar(len(harness.OFFICIAL) * repeats * contestants, "protocol") as bar:
        found = harness.compare(
            kernel, harness.OFFICIAL, bench.rounds(1000, 100), repeats, against=bench.found, tick=bar.update
        ).to_dict()
    failures = {name: entry["failure"] for name, entry in found["entries"].items() if entry["failure"]}
    return found | {"failures": failures}


def cold_start(bench: Bench) -> dict:
    """First call with an empty Triton cache and in a new process with a warm one; imports reported apart."""
    repeats = bench.rounds(3, 1)
    jobs = ("kernel",) if bench.quick else ("kernel", "trivial")
    torch.cuda.empty_cache()
    with bench.bar(2 * repeats * len(jobs), "cold") as bar:
        return {job: first_call.starts(job, repeats, bar.update) for job in jobs}


def machine_code(bench: Bench) -> dict:
    """Instructions an output element in sm_75 code: ours, and those of Unsloth with the installed Triton."""
    from helpers.t4 import forecast, sass

    theirs = sass.unsloth(75)
    who = (
        "unsloth default"
        if environment.release(environment.version_of("triton")) < (3, 7)
        else "unsloth T4 table"
    )
    rows = {}
    for dtype in DTYPES:
        compiled, other = sass.compile_kernel(dtype), forecast.find(theirs, who, dtype)
        rows[dtype] = {
            "ours": compiled.counted.per_element()["total"],
            "unsloth_today": other.counted.per_element()["total"] if other else None,
            "over_budget": sass.over_budget(compiled, dtype),
        }
    return {"arch": 75, "rows": rows, "unsloth_row": who}


def compiles(bench: Bench) -> dict:
    """Compiles over all layer shapes of Llama-3 8B and 70B, counted in a fresh process."""
    torch.cuda.empty_cache()
    return first_call.compiles()


SECTIONS: dict[str, Callable[[Bench], dict]] = {
    "host": host,
    "protocol": protocol,
    "gpu": gpu,
    "gemm": gemm,
    "cold": cold_start,
    "compiles": compiles,
    "sass": machine_code,
    "ablation": ablation,
}


# What --quick measures unless --only says otherwise: the others compile a lot.
QUICK = ("host", "protocol", "gpu", "gemm", "cold")


def _failures(found) -> list[str]:
    """Every reason recorded under "failures" or "failed", anywhere in the data."""
    if isinstance(found, list):
        return [why for item in found for why in _failures(item)]
    if not isinstance(found, dict):
        return []
    own = [f"{name}: {why}" for name, why in found.get("failures", {}).items()]
    own += [found["failed"]] if "failed" in found else []
    return own + [
        why for key, value in found.items() if key not in ("failures", "failed") for why in _failures(value)
    ]


def measure(only: list[str] | None = None, quick: bool = False) -> dict:
    """The sections' data (all by default); a section that cannot run carries its reason."""
    chosen = list(only or (QUICK if quick else SECTIONS))
    if not environment.has_gpu():
        return {"quick": quick, **{name: {"not_measured": NEEDS_GPU} for name in only or SECTIONS}}
    start = time.perf_counter()
    found = baselines.available()
    bench = Bench(nf4_kernel, found, quick)
    data: dict = {
        "quick": quick,
        "baselines": {
            name: {"label": b.label, "version": b.version, "absent": b.reason if b.fn is None else ""}
            for name, b in found.items()
        },
        "settings": dataclasses.asdict(bench.module.settings()),
    }
    if found["bitsandbytes"].fn is None:
        reason = f"needs bitsandbytes for the correctness gate: {found['bitsandbytes'].reason}"
        return data | {name: {"not_measured": reason} for name in chosen}
    with tqdm(chosen, desc="bench", disable=None) as bar:
        for name in bar:
            bar.set_postfix_str(name)
            began = time.perf_counter()
            try:
                data[name] = SECTIONS[name](bench)
            except Exception as error:
                traceback.print_exc()
                data[name] = {"failed": f"{name}: {why(error)}"}
            data[name]["seconds"] = time.perf_counter() - began
            torch.cuda.empty_cache()
    # Unsloth falls back to its classic path for good when its fused kernel fails: then "today" is not today.
    utils = sys.modules.get("unsloth.kernels.utils")
    data["unsloth_fused"] = getattr(utils, "_USE_NF4_KERNELS", None)
    return data | {"seconds": time.perf_counter() - start}


def merge(files: list[Path]) -> dict:
    """One full result of files that hold some sections each (`bench --only SECTION --json FILE`).

    They must be of the same kernel cells, card and versions, else ValueError. data["measured_apart"] holds
    the time of each section.
    """
    parts = [results.read(path.name, path.parent) for path in files]
    for path, part in zip(files, parts, strict=True):
        part["of"] = part["environment"] | {"date": "", "kernel": part["kernel_hash"]}
        if part["of"] != parts[0]["of"]:
            raise ValueError(f"{path} is of {part['of']}, expected that of {files[0]}: {parts[0]['of']}")
    dates = {name: part["environment"]["date"] for part in parts for name in SECTIONS if name in part["data"]}
    count = sum(name in part["data"] for part in parts for name in SECTIONS)
    if dates.keys() != SECTIONS.keys() or count != len(SECTIONS) or any(p["data"]["quick"] for p in parts):
        raise ValueError(
            f"the files hold {', '.join(dates)}; expected {', '.join(SECTIONS)} once each, not quick"
        )
    data = {name: value for part in parts for name, value in part["data"].items()}
    data["unsloth_fused"] = all(part["data"]["unsloth_fused"] for part in parts)
    data |= {"seconds": sum(part["data"]["seconds"] for part in parts), "measured_apart": dates}
    first = parts[0]
    return {"environment": first["environment"], "kernel_hash": first["kernel_hash"], "data": data}


def _store_merged(files: list[Path], path: Path) -> int:
    try:
        found = merge(files)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    plots.save_all(found, path.parent / "figures")
    print("written:", path)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Measure, write the result file, print the table of targets. 1 when something failed, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m helpers bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a minute instead of several; not stored by itself"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the data here")
    parser.add_argument(
        "--only", action="append", choices=list(SECTIONS), help="one section; may be repeated"
    )
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", help="store the sections of such files as one result"
    )
    options = parser.parse_args(argv)
    if options.merge:
        return _store_merged(options.merge, options.json or environment.result_folder() / f"{NAME}.json")
    data = measure(options.only, options.quick)
    missing = {name: data[name]["not_measured"] for name in SECTIONS if "not_measured" in data.get(name, {})}
    measured = any(name in data and name not in missing for name in SECTIONS)
    for name, reason in missing.items():
        print(f"{name}: not measured ({reason})")
    if options.json:
        print("written:", results.write(options.json.name, data, options.json.parent))
    elif measured and not options.quick and not options.only:
        path = results.write(NAME, data)
        plots.save_all(results.read(NAME, path.parent), path.parent / "figures")
        print("written:", path)
    problems = _failures(data)
    if measured:
        print(tables.summary(data), tables.text(table(data)), sep="\n\n")
    for problem in problems:
        print("FAILED", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
