"""Dequantize 4-bit weights: check this machine, export a model in 16 bit, or verify an export."""

import argparse
import contextlib
import logging
import os
import re
import shlex
import signal
import sys
import warnings

from . import __version__
from .doctor import NEEDED, doctor
from .environment import missing
from .export import problems

DOCTOR = "say what works here, and what is missing; exit status 1 if the kernel does not work, else 0"
EXPORT = """write a quantized checkpoint in 16 bit, or merge a LoRA adapter into its base;
exit status 0 if OUT was written, 1 if not"""
VERIFY = """compare OUT with what was trained, in the next tokens of a text; takes the export's arguments;
exit status 0 if they agree, 1 if not, 2 if nothing was compared"""
EXAMPLES = """examples:
  nf4_triton doctor
  nf4_triton export outputs/checkpoint-500 merged
  nf4_triton verify outputs/checkpoint-500 merged"""
PROGRAM = "python -m nf4_triton" if sys.argv[0].endswith("__main__.py") else "nf4_triton"
OPTIONS = {  # option: help
    "--base": "what an adapter is merged into: a folder, a/b, a/b@REVISION (default: what it was trained on)",
    "--trained-in": "nf4, nf4+double, fp4, or fp4+double, if training quantized a 16-bit base on loading",
    "--load-dtype": "the dtype in which that training loaded the base (default: its config's),\n"
    "which OUT gets, too; after float32, OUT gets the dtype that the base has",
    "--skip-modules": "that training's llm_int8_skip_modules, such as lm_head,o_proj",
    "--dtype": "float16, bfloat16, or float32 (default: as it is stored)",
    "--shard-size": "the largest size of a file (default: 5GB)",
    "--device": "where to quantize and merge (default: the GPU, if there is one)",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status. Ctrl-C ends the process with 130."""
    run, options = parse(sys.argv[1:] if arguments is None else arguments)
    token = problems.command.set(True)
    try:
        status = run(**options)
        print(end="", flush=True)  # nothing where stdout was closed
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)  # Python itself would first free the model and unload torch, which takes seconds
    except BrokenPipeError:  # of `doctor | head -1`; Python flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    finally:
        problems.command.reset(token)


def parse(arguments) -> tuple:
    """Return the function that runs a command, and its options."""
    if arguments[:1] in (["help"], ["version"]):  # `help export` is `export --help`
        arguments = [*arguments[1:], f"--{arguments[0]}"]
    parser = argparse.ArgumentParser(
        "nf4_triton", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"nf4_triton {__version__}")
    commands = parser.add_subparsers(required=True, metavar="doctor | export | verify", dest="command")
    checking = commands.add_parser("doctor", help=DOCTOR, description=DOCTOR)
    checking.set_defaults(run=doctor)
    what = "check the export alone; exit status 1 if it does not work, else 0"
    checking.add_argument("what", nargs="?", choices=["export"], help=what)
    for run, what in (export, EXPORT), (verify, VERIFY):
        command = commands.add_parser(run.__name__, help=what.partition(";")[0], description=what)
        command.epilog, command.formatter_class = EXAMPLES, argparse.RawTextHelpFormatter
        command.set_defaults(run=run)
        source = "a quantized checkpoint or an adapter: a folder, a file, or a name on the hub"
        command.add_argument("source", help=source)
        command.add_argument("out", help="what the export writes: a new or an empty folder")
        for option, text in OPTIONS.items():
            kind = str if option in ("--base", "--skip-modules") else str.lower
            command.add_argument(option, type=kind, help=text)
        command.add_argument("--unchecked", action="store_true", help="for models unknown to transformers")
    commands.choices["export"].set_defaults(typed=arguments)
    commands.choices["verify"].add_argument("--text", help="a file to compare with (default: a short text)")
    spelled = [re.sub("^--[^=]+", lambda x: x[0].lower().replace("_", "-"), text) for text in arguments]
    known, unknown = parser.parse_known_args(spelled)
    options = vars(known)
    command = commands.choices[options.pop("command")]
    if unknown:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options.pop("run"), options


def export(source, out, shard_size, typed, **options) -> int:
    """Write a model in 16 bit. Return the exit status."""
    out = os.path.expanduser(out)

    def end(*_):
        if not (os.path.isdir(out) and os.listdir(out)):  # else it is complete
            sys.exit(143)  # so that what was written so far is deleted

    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # Windows has no SIGHUP
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, end)
    try:
        prepare()
        from .export.export import export_checkpoint
        from .export.verify import next_tokens

        counts = export_checkpoint(source, out, shard_size=shard_size or "5GB", **options)
    except (ImportError, OSError, ValueError) as error:
        print(f"Nothing was written: {error}", file=sys.stderr)
        return 1
    line = f"{problems.spoken(out)}: {counts.written} tensors in {counts.dtypes}, {counts.size / 1e6:,.1f} MB"
    line += f"; {counts.dequantized} dequantized, {counts.merged} merged"
    if "float32" in counts.dtypes:
        line += "; in float32: --dtype bfloat16 for 16 bit"
    if not os.path.exists(os.path.join(out, "config.json")):
        line += "; without config.json"
    print(line)
    with contextlib.suppress(ValueError):  # of a model without next tokens
        next_tokens(out)
        command = shlex.join(["verify" if word == "export" else word for word in typed])
        if command.isprintable():  # names can control a terminal
            print(f"To compare it with what was trained: {PROGRAM} {command}")
    return 0


def verify(source, out, unchecked, dtype, shard_size, **options) -> int:
    """Compare what the export wrote with what was trained. Return the exit status."""
    out = os.path.expanduser(out)
    try:
        prepare(bars=True)
        from .export.verify import verify

        found = verify(source, out, **options)
    except (ImportError, OSError, ValueError) as error:
        print(f"Nothing was compared: {error}", file=sys.stderr)
        return 2
    for name, (divergence, same) in found.items():
        print(f"{name}: KL divergence from what was trained {divergence:.2g}, same next token {same:.1%}")
    got, *alone = [divergence for divergence, _ in found.values()]
    if alone and alone[0] < 1e-3:
        print("The adapter changes too little to judge.")
    limit = max(1e-3, alone[0] / 4) if alone else 0.01
    out = problems.spoken(out)
    if got <= limit:  # not NaN
        print(f"{out} answers as what was trained: its divergence is at most {limit:.2g}.")
        return 0
    print(f"{out} does not answer as what was trained: export it with the options that fit its training.")
    return 1


def prepare(bars=False):
    """Raise if a package is missing. Silence the libraries, except for bars of downloads.

    bars: keep bars of loading, too.
    """
    if problem := missing(*NEEDED):
        raise ImportError(problem)
    warnings.simplefilter("ignore")
    for library in ("bitsandbytes", "torch.utils.flop_counter"):  # the latter warns that Triton is missing
        logging.getLogger(library).setLevel(logging.ERROR)

    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as reports

    reports.set_verbosity_error()
    if not bars:
        reports.disable_progress_bar()  # all bars of huggingface_hub, too
        enable_progress_bars()


if __name__ == "__main__":
    sys.exit(main())
