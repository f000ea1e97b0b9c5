"""usage: python -m helpers COMMAND [ARGUMENT ...]

doctor               check this machine: versions, correctness; what to fix
run                  run the notebook, print the score and where its executed copy is
bench [SECTION ...]  time the kernel against the baselines; training with and without it
cross                cross-compile for the cards people own; check the machine code
draw [NOTEBOOK]      store the rows of an executed notebook; fill README and docs from the results
sync [NOTEBOOK]      write the modules' sections, and an executed notebook's outputs, into the notebook
"""

import pkgutil
import signal
import sys

COMMANDS = {  # its function, and how many arguments it takes at most
    "doctor": ("helpers.__main__:doctor", 1),
    "run": ("helpers.puzzle.notebook:run", 0),
    "bench": ("helpers.bench.bench:main", 9),
    "cross": ("helpers.cross.machine_code:main", 0),
    "draw": ("helpers.results.pages:main", 1),
    "sync": ("helpers.puzzle.notebook:write", 1),
}


def doctor(*arguments: str) -> int:
    """Run the package's doctor."""
    from nf4_triton import __main__ as package

    return package.main(["doctor", *arguments])


def main(argv: list[str]) -> int:
    """Run a command; return its exit status, 2 for a command line that is not as in the usage."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a terminal may know only ASCII
    if not argv or {"-h", "--help"} & {*argv}:
        print(__doc__.strip())
        return 0
    command, *arguments = argv
    function, most = COMMANDS.get(command, ("", 0))
    if not function or len(arguments) > most or any(text.startswith("-") for text in arguments):
        print(f"not a command: {' '.join(argv)}\n{__doc__.strip()}", file=sys.stderr)
        return 2
    from helpers import machine

    for ending in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: the command ends what it started
        if signal.getsignal(ending) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(ending, signal.default_int_handler)
    try:
        machine.prepare()  # before anything imports triton
        return pkgutil.resolve_name(function)(*arguments)
    except (ModuleNotFoundError, OSError) as error:  # a package that is missing, or a full disk
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
