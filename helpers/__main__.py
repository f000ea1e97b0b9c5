"""usage: python -m helpers COMMAND [--help]

doctor    check this machine: versions, correctness; what to fix
run       run the notebook, print the score and where the files are
bench     time the kernel against the baselines; training with and without it
cross     cross-compile for the cards people own; check the machine code
draw      fill README and docs from the results; store those of an executed notebook
sync      write the modules' sections into the notebook's cells
"""

import pkgutil
import signal
import sys

COMMANDS = {
    "doctor": "helpers.__main__:doctor",
    "run": "helpers.puzzle.notebook:run",
    "bench": "helpers.bench.bench:main",
    "cross": "helpers.cross.sass:main",
    "draw": "helpers.results.pages:main",
    "sync": "helpers.puzzle.notebook:write",
}


def doctor(argv: list[str]) -> int:
    """Run the package's doctor."""
    from nf4_triton import __main__ as package

    return package.main(["doctor", *argv])


def main(argv: list[str]) -> int:
    """Run a command; return its exit status, 2 for an unknown one."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    command, *rest = argv or ["--help"]
    if command in ("-h", "--help", "help"):
        print(__doc__.strip())
        return 0
    if command not in COMMANDS:
        print(f"unknown command: {command}\n{__doc__.strip()}", file=sys.stderr)
        return 2
    from helpers import machine

    sys.argv[0] = f"python -m helpers {command}"  # what argparse shows as the program
    for ending in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: the command ends what it started
        if signal.getsignal(ending) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(ending, signal.default_int_handler)
    try:
        machine.prepare()  # before anything imports triton
        return pkgutil.resolve_name(COMMANDS[command])(rest)
    except ModuleNotFoundError as error:
        if (error.name or "helpers").split(".")[0] == "helpers":
            raise
        print(f"{error.name} is not installed: {sys.executable} -m pip install {error.name}", file=sys.stderr)
        return 1
    except OSError as error:  # of a full disk
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
