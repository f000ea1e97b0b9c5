"""python -m helpers bench: time the kernel against every library, section by section.

All contenders take turns in one process, and none is timed before its result is bit-identical to the plain
torch reference. A section is printed and stored under results/<card>/ as soon as it is done, so a run that is
cut short keeps what it has.
"""

import argparse
import functools
import sys
import time
import traceback

import torch

from helpers import machine
from helpers.bench import gpu, host, training
from helpers.bench.contenders import why
from helpers.puzzle import protocol
from helpers.puzzle.layers import ON_GPU
from helpers.results import store
from helpers.results.store import Row

# problems -> (case, unit, {contender: values}) of each case; what goes wrong is added to the problems
SECTIONS = {
    "gpu_time": gpu.time_sizes,
    "settings": gpu.time_settings,
    "host_time": host.time_host,
}
DEFAULT = tuple(SECTIONS)  # the others train for minutes
SECTIONS |= {name: functools.partial(training.time_section, name) for name in training.RUNS}
INTERRUPTED = "interrupted"


def run_section(name: str) -> tuple[list[Row], list[str]]:
    """Return a section's rows, as far as it comes, and what went wrong in it."""
    rows, problems = [], []
    try:
        for case, unit, found in SECTIONS[name](problems):
            for contender, values in found.items():
                rows.append(Row(name, case, contender, unit, values))
    except KeyboardInterrupt:
        problems.append(INTERRUPTED)
    except Exception as error:
        traceback.print_exc()
        problems.append(why(error))
    utils = sys.modules.get("unsloth.kernels.utils")
    if getattr(utils, "_USE_NF4_KERNELS", True) is False:
        problems.append("unsloth_today: Unsloth gave up its fused kernel and took its classic path")
    torch.cuda.empty_cache()
    return rows, problems


def main(argv: list[str] | None = None) -> int:
    """Run, print and store the sections. Returns 1 if a contender was wrong or a section failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m helpers bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(SECTIONS),
        default=DEFAULT,
        metavar="SECTION",
        help=f"any of {', '.join(SECTIONS)}; by default {', '.join(DEFAULT)}",
    )
    into = "folder under results/ in place of this card's, such as nvidia-h100-triton-3.9 for another Triton"
    parser.add_argument("--into", metavar="FOLDER", help=into)
    options = parser.parse_args(argv)
    if not ON_GPU:
        print(machine.no_gpu())
        return 1
    protocol.baselines()  # before anything else imports Unsloth
    failed = False
    for name in options.only:
        start = time.perf_counter()
        rows, problems = run_section(name)
        print(f"\n{name}, {time.perf_counter() - start:.0f} s; median (lowest to highest)")
        for row in rows:
            spread = f"{row.low:.4g} to {row.high:.4g}"
            print(f"{row.case}, {row.contender}: {row.median:.4g} {row.unit} ({spread})")
        for problem in problems:
            print("FAILED", problem)
        failed |= bool(problems)
        if rows:
            path = store.write(name, rows, options.into, note="; ".join(problems))
            print(f"stored in {path}", flush=True)
        if INTERRUPTED in problems:
            return 130
    return int(failed)
