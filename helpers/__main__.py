"""python -m helpers doctor | run | bench | sass | score | train-bench: each has its own --help."""

import importlib
import sys

COMMANDS = {
    "doctor": (
        "helpers.measure.doctor",
        "check this machine: versions, correctness, speed; what to fix and how",
    ),
    "run": ("helpers.submission.execute", "execute the notebook, print the score and where the files are"),
    "bench": ("helpers.measure.benchmark", "measure against the baselines"),
    "sass": ("helpers.t4.sass", "cross-compile for a card and count its instructions"),
    "score": ("helpers.submission.scoring", "the marking table from evidence on this machine"),
    "train-bench": ("helpers.training.train_bench", "the kernel inside a QLoRA training step"),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print("usage: python -m helpers COMMAND [--help]\n")
        for name, (_, what) in COMMANDS.items():
            print(f"  {name:12} {what}")
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    module = COMMANDS[argv[0]][0]
    sys.argv[0] = f"python -m helpers {argv[0]}"  # what argparse shows as the program
    return importlib.import_module(module).main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
