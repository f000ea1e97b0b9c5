"""Install what requirements.txt names into the running Python, or say what is missing; for colab_setup.sh.

    python -m helpers.install --check          what is missing: exit status 0 when nothing is
    python -m helpers.install [--group test]   install it; a second call installs nothing

Needs only the standard library and pip. In Colab and Kaggle every package already there keeps its version.
"""

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

try:  # before anything is installed there is pip alone
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name
except ImportError:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

from helpers import machine

REQUIREMENTS = machine.ROOT / "requirements.txt"
LOG = machine.ROOT / "build" / "setup.log"
GROUPS = ("run", "test", "gpu", "unsloth")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_TORCH = "torch==2.13.0"  # without the CPU index: some machines keep a CPU build of this one
LEFT_ALONE = "that of Colab and Kaggle is left alone: start a new runtime of the newest image."
VERIFY = """
import torch, triton, bitsandbytes
from helpers import machine
print(f"torch {torch.__version__}, triton {triton.__version__}, bitsandbytes {bitsandbytes.__version__}")
print(machine.no_gpu() or "")
"""
# What a failed pip's log shows: what to do about it.
ADVICE = {
    "No space left on device|Errno 28": "The disk is full: free some space and run the same command again.",
    "NewConnectionError|NameResolutionError|(Connect|Read)TimeoutError|ProxyError|Network is unreachable|"
    "Name or service not known|Temporary failure in name resolution|Connection refused": (
        "The package index did not answer: check the network (or proxy; in Kaggle: Settings > Internet on) "
        "and run again."
    ),
    "ResolutionImpossible|No matching distribution": (
        "No version of it fits this Python and what is installed: pip's message names the package."
    ),
    "": "pip's message names the package.",
}


class SetupError(Exception):
    """The set-up cannot go on; the text says why and what to do."""


def check_machine(gpus: list[str]) -> None:
    """Raise SetupError where the kernel cannot run at all, or where a Colab user forgot to choose a GPU."""
    if sys.platform != "linux":
        raise SetupError("Triton has wheels for Linux only. On Windows use WSL; on a Mac use Google Colab.")
    answers = machine.nvidia_smi("compute_cap")  # "7.5", or "[N/A]"
    known = [tuple(map(int, answer.split("."))) for answer in answers if answer[:1].isdigit()]
    if known and max(known) < machine.MIN_CAPABILITY:
        have = "{} (sm_{}{})".format(", ".join(gpus), *max(known))
        raise SetupError(f"{have}: the kernel needs sm_75 or newer. {machine.switch_on_gpu()}")
    if machine.hosted() and not gpus and os.environ.get("NF4_ALLOW_CPU") != "1":
        raise SetupError(
            f"No GPU here. {machine.switch_on_gpu()}\n"
            "Or go on without one (Triton's interpreter: correctness only, no speed): set NF4_ALLOW_CPU=1."
        )


def requirements(*groups: str) -> dict[str, Requirement]:
    """By name, each line of requirements.txt that applies: plain ones, and those of `groups`."""
    chosen = {}
    for line in REQUIREMENTS.read_text().splitlines():
        if text := line.split("#")[0].strip():
            requirement = Requirement(text)
            marker, requirement.marker = requirement.marker, None
            if marker is None or any(marker.evaluate({"extra": group}) for group in ("", *groups)):
                chosen[canonicalize_name(requirement.name)] = requirement
    return chosen


def installed() -> dict[str, str]:
    """Name and version of every installed distribution."""
    versions = {}
    for distribution in importlib.metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name and version:  # a damaged entry has neither
            versions.setdefault(canonicalize_name(name), version)
    return versions


def missing(required: dict, versions: dict[str, str]) -> dict[str, Requirement]:
    """The requirements that `versions` do not satisfy."""
    return {
        name: requirement
        for name, requirement in required.items()
        if name not in versions or not requirement.specifier.contains(versions[name], prereleases=True)
    }


def diagnose(log: str) -> str:
    """What to do about a failed pip, from its log."""
    return next(advice for sign, advice in ADVICE.items() if re.search(sign, log))


def pip(what: str, *arguments: str) -> None:
    """Run `pip install`, its errors shown and all it says in build/setup.log. Raises SetupError."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    LOG.write_text("")
    print(f"installing {what} ...", flush=True)
    options = ["--disable-pip-version-check", "--quiet", "--log", str(LOG)]
    if subprocess.run([sys.executable, "-m", "pip", "install", *options, *arguments]).returncode:
        advice = diagnose(LOG.read_text(errors="replace"))
        raise SetupError(f"{what} did not install. {advice}\nAll that pip said: {LOG}")


def wrong_build(gpus: list) -> bool:
    """True where torch is a CPU build beside a GPU."""
    return bool(gpus) and "+cpu" in (machine.version_of("torch") or "")


def install_torch(gpus: list) -> None:
    """Install torch unless the one already there will do: with CUDA for a GPU, else the small CPU build."""
    present, wrong = machine.version_of("torch"), wrong_build(gpus)
    torch = requirements()["torch"]
    if present and not wrong and torch.specifier.contains(present, prereleases=True):
        return
    if present and machine.hosted():
        build = " (a build without CUDA)" if wrong else ""
        raise SetupError(f"torch {present}{build} does not fit {torch}; {LEFT_ALONE}")
    if wrong:  # pip takes the CPU build for the version it is of
        pip("torch with CUDA (about 3 GB)", str(torch), "--force-reinstall", "--no-deps")
    if gpus:
        pip("torch with CUDA and what it needs (about 3 GB)", str(torch))
        return
    # isolated: pip's own settings may name other indexes, whose newest torch comes with gigabytes of CUDA
    quick = ["--isolated", "--index-url", CPU_INDEX, "--timeout", "10", "--retries", "1"]
    try:
        pip(f"torch, CPU build, from {CPU_INDEX}", str(torch), *quick)
    except SetupError as error:
        print(error, flush=True)
        pip(f"{CPU_TORCH} (an index without its CPU build brings several GB of CUDA libraries)", CPU_TORCH)


def install(required: dict[str, Requirement], gpus: list) -> None:
    """Install what of the required is missing. Raises SetupError."""
    install_torch(gpus)
    hosted, present = machine.hosted(), installed()
    unfit = missing(required, present)
    if hosted and "triton" in present and "triton" in unfit:
        raise SetupError(f"triton {present['triton']} does not fit {required['triton']}; {LEFT_ALONE}")
    alone = requirements("unsloth").keys() - requirements().keys()
    together = {name: item for name, item in required.items() if name not in alone}
    # In Colab and Kaggle nothing that fits may change; in an environment of our own only these two matter.
    pinned = (present.keys() if hosted else {"torch", "triton"} & present.keys()) - unfit.keys()
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={present[name]}\n" for name in sorted(pinned)))
        pip(", ".join(together), *map(str, together.values()), "--constraint", str(constraints))
    if gpus:
        pip(", ".join(sorted(alone)), "--no-deps", *(str(required[name]) for name in sorted(alone)))


def verify(gpus: list) -> None:
    """Import the main packages in a fresh Python, and check that torch sees the GPU. Raises SetupError."""
    done = machine.python(["-c", VERIFY], check=False)
    if done.status != 0:
        raise SetupError(f"the installed packages do not import:\n{done.err.strip()}")
    versions, _, problem = done.out.strip().partition("\n")
    print(versions)
    if gpus and problem:
        raise SetupError(problem)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m helpers.install", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--group", action="append", default=[], choices=GROUPS, help="also this group")
    parser.add_argument("--check", action="store_true", help="only say what is missing")
    options = parser.parse_args(argv)
    gpus, present = machine.nvidia_smi("name"), installed()
    required = requirements(*options.group, *(("gpu", "unsloth") if gpus else ()))
    gaps = missing(required, present)
    for name, requirement in gaps.items():
        print(f"missing: {requirement} (installed: {present.get(name, 'none')})")
    if options.check:
        return 1 if gaps else 0
    machine.give_home()  # where pip keeps its cache
    try:
        check_machine(gpus)
        if gaps or wrong_build(gpus):
            install(required, gpus)
        verify(gpus)
    except SetupError as error:
        print(f"\nSET-UP FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
