"""python -m helpers bench [SECTION ...]: time the kernel and every library, section by section.

All contenders take turns in one process. Only those whose results are bit-identical to the plain torch
reference are timed. Each section is printed and stored under results/<card>/ as soon as it is done, so an
interrupted run keeps the earlier ones.
"""

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

# problems -> (case, unit, {contender: values}) for each case; errors are added to the problems
SECTIONS = {
    "gpu_time": gpu.time_sizes,
    "host_time": host.time_host,
}
DEFAULT = tuple(SECTIONS)  # the others train for minutes
SECTIONS |= {name: functools.partial(training.time_section, name) for name in training.RUNS}
INTERRUPTED = "interrupted"


def run_section(name: str) -> tuple[list[Row], list[str]]:
    """Return a section's rows, as far as it got, and what went wrong."""
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
    if "unsloth_today" in protocol.baselines() and (off := protocol.needed("unsloth_today")):
        problems.append(f"unsloth_today: needs {off}")
    torch.cuda.empty_cache()
    return rows, problems


def main(*sections: str) -> int:
    """Run, print, and store the sections, DEFAULT if none is named.

    Returns 2 if a section does not exist, 1 if a contender was wrong or a section failed, else 0.
    """
    if unknown := [name for name in sections if name not in SECTIONS]:
        print(f"no section {', '.join(unknown)}: expected any of {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    if not ON_GPU:
        print(machine.no_gpu())
        return 1
    protocol.baselines()  # before anything else imports Unsloth
    failed = False
    for name in sections or DEFAULT:
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
            path = store.write(name, rows, note="; ".join(problems))
            print(f"stored in {path}", flush=True)
        if INTERRUPTED in problems:
            return 130
    return int(failed)
