"""Install what requirements.txt names into the running Python, or say what is missing; for colab_setup.sh.

    python -m helpers.machine.install --check          what is missing: exit status 0 when nothing is
    python -m helpers.machine.install [--group test]   install it; a second call installs nothing

Needs only the standard library and pip. In Colab and Kaggle every package already there keeps its version.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from helpers.machine import environment

REQUIREMENTS = environment.ROOT / "requirements.txt"
LOG = environment.ROOT / "build" / "setup.log"
GROUPS = ("run", "test", "gpu", "unsloth")
PYTHONS = ((3, 10), (3, 13))
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_TORCH = "torch==2.13.0"  # without the CPU index: some machines keep a CPU build of this one
NEED_GB = {"cpu": 3, "gpu": 10, "hosted": 2}
VERIFY = """
import torch, triton, bitsandbytes
from helpers.machine import environment
print(f"torch {torch.__version__}, triton {triton.__version__}, bitsandbytes {bitsandbytes.__version__}")
print(environment.no_gpu() or "")
"""


class SetupError(Exception):
    """The set-up cannot go on; the text says why and what to do."""


def hosted() -> bool:
    """True where packages go into the running Python: Colab or Kaggle."""
    return environment.colab() or environment.kaggle()


def nvidia_gpus() -> list[tuple[str, tuple[int, int] | None]]:
    """(name, compute capability or None) of each GPU that nvidia-smi lists, without importing torch."""
    command = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in done.stdout.strip().splitlines():
        name, _, number = (part.strip() for part in line.rpartition(","))
        major, _, minor = number.partition(".")
        known = major.isdigit() and minor.isdigit()
        gpus.append((name, (int(major), int(minor)) if known else None))
    return gpus


def check_machine(gpus: list) -> None:
    """Raise SetupError where the kernel cannot run at all, or where a Colab user forgot to choose a GPU."""
    low, high = (".".join(map(str, version)) for version in PYTHONS)
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        raise SetupError(f"Python {platform.python_version()}: {low} to {high} is needed.")
    if sys.platform != "linux":
        raise SetupError("Triton has wheels for Linux only. On Windows use WSL; on a Mac use Google Colab.")
    known = [capability for _, capability in gpus if capability]
    if known and max(known) < environment.MIN_CAPABILITY:
        have = ", ".join(f"{name} (sm_{major}{minor})" for name, (major, minor) in gpus)
        raise SetupError(f"{have}: the kernel needs sm_75 or newer. {environment.switch_on_gpu()}")
    if hosted() and not gpus and os.environ.get("NF4_ALLOW_CPU") != "1":
        raise SetupError(
            f"No GPU here. {environment.switch_on_gpu()}\n"
            "Or go on without one (Triton's interpreter: correctness only, no speed): set NF4_ALLOW_CPU=1."
        )


def normal(name: str) -> str:
    """A distribution's name as indexes compare it: lower case, hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(*groups: str) -> dict:
    """Name and Requirement of each line of requirements.txt that applies: plain ones, those of `groups`."""
    try:
        from pip._vendor.packaging.requirements import Requirement
    except ImportError:
        from packaging.requirements import Requirement
    chosen = {}
    for line in REQUIREMENTS.read_text().splitlines():
        if text := line.split("#")[0].strip():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": group}) for group in ("", *groups)):
                requirement.marker = None
                chosen[normal(requirement.name)] = requirement
    return chosen


def installed() -> dict[str, str]:
    """Normal name and version of every installed distribution."""
    versions = {}
    for distribution in importlib.metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name and version:  # a damaged entry has neither
            versions.setdefault(normal(name), version)
    return versions


def missing(required: dict, versions: dict[str, str]) -> dict:
    """The requirements that `versions` do not satisfy."""
    return {
        name: requirement
        for name, requirement in required.items()
        if name not in versions or not requirement.specifier.contains(versions[name], prereleases=True)
    }


def wanted(groups: list[str], gpus: list) -> dict:
    """All requirements for these groups on this machine."""
    return requirements(*groups, *(("gpu", "unsloth") if gpus else ()))


def stamp_file() -> Path:
    """Written after a complete installation, beside the packages, so that it is lost together with them."""
    return Path(sysconfig.get_path("purelib")) / "nf4_triton_setup.json"


def fingerprint(groups: list[str], gpus: list) -> str:
    """Changes when an installation has to be looked at again."""
    facts = [REQUIREMENTS.read_text(), platform.python_version(), bool(gpus), sorted(groups)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def stamps() -> list[str]:
    try:
        return json.loads(stamp_file().read_text())
    except (OSError, ValueError):
        return []


def check_disk(kind: str) -> None:
    """Raise SetupError unless the folder of the packages has the space that `kind` of installation needs."""
    folder = sysconfig.get_path("purelib")
    free = shutil.disk_usage(folder).free / 1e9
    if free < NEED_GB[kind]:
        raise SetupError(
            f"{free:.1f} GB free in {folder}, about {NEED_GB[kind]} GB needed. Free some space "
            "(`pip cache purge`, old environments), or put the repository on a larger disk."
        )


def diagnose(log: str) -> str:
    """What to do about a failed pip, from its log."""
    if "No space left on device" in log or "Errno 28" in log:
        return "The disk is full: free some space and run the same command again."
    network = (
        "NewConnectionError",
        "NameResolutionError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ProxyError",
        "Network is unreachable",
        "Name or service not known",
        "Temporary failure in name resolution",
        "Connection refused",
    )
    if any(sign in log for sign in network):
        where = " In Kaggle: Settings > Internet on." if environment.kaggle() else ""
        return f"The package index did not answer: check the network (or proxy) and run again.{where}"
    if "ResolutionImpossible" in log or "No matching distribution" in log:
        return "No version of it fits this Python and what is installed: pip's message names the package."
    return "pip's message names the package."


def pip(what: str, *arguments: str, required: bool = True, isolated: bool = False) -> bool:
    """Run `pip install`, its errors shown and all it says in build/setup.log; True when it worked.

    Raises SetupError when something `required` did not install. `isolated` ignores pip's own settings.
    """
    LOG.parent.mkdir(parents=True, exist_ok=True)
    options = ["--isolated"] if isolated else []
    command = [sys.executable, "-m", "pip", *options, "install", "--disable-pip-version-check", *arguments]
    print(f"installing {what} ...", flush=True)
    start = time.monotonic()
    with LOG.open("a+", errors="replace") as log:
        mark = log.seek(0, os.SEEK_END)
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                print(f"  {time.monotonic() - start:3.0f} s: {last_line(log, mark)}", flush=True)
        log.seek(mark)
        output = log.read()
    if process.returncode == 0:
        print(f"  done in {time.monotonic() - start:.0f} s", flush=True)
        return True
    if not required:
        print(f"  not installed: {diagnose(output)}", flush=True)
        return False
    print("\n".join(line for line in output.splitlines() if line.startswith("ERROR")), file=sys.stderr)
    raise SetupError(f"{what} did not install. {diagnose(output)}\nAll that pip said: {LOG}")


def last_line(log, mark: int) -> str:
    """The last line that was written after `mark`, cut to a screen's width."""
    log.seek(mark)
    lines = log.read().split("\n")
    return next((line.strip()[:90] for line in reversed(lines) if line.strip()), "")


def install_torch(gpus: list) -> None:
    """Install torch unless the one already there will do: with CUDA for a GPU, else the small CPU build."""
    present = environment.version_of("torch")
    torch = requirements()["torch"]
    wrong_build = bool(gpus) and "+cpu" in (present or "")
    if present and not wrong_build and torch.specifier.contains(present, prereleases=True):
        return
    if present and hosted():
        build = " (a build without CUDA)" if wrong_build else ""
        raise SetupError(
            f"torch {present}{build} does not fit {torch}, and the torch of Colab and Kaggle is left alone: "
            "start a new runtime of the newest image."
        )
    if gpus:
        again = ["--force-reinstall", "--no-deps"] if wrong_build else []
        pip("torch with CUDA (about 3 GB)", str(torch), *again)
        if again:
            pip("what torch with CUDA needs", str(torch))
        return
    # isolated: pip's own settings may name other indexes, whose newest torch comes with gigabytes of CUDA
    quick = ["--index-url", CPU_INDEX, "--timeout", "10", "--retries", "1"]
    if not pip(f"torch, CPU build, from {CPU_INDEX}", str(torch), *quick, required=False, isolated=True):
        pip(f"{CPU_TORCH} (an index without its CPU build brings several GB of CUDA libraries)", CPU_TORCH)


def install(groups: list[str], gpus: list) -> None:
    """Install all that is missing, check that it imports, and leave the stamp. Raises SetupError."""
    before = installed()
    check_disk("hosted" if hosted() else "gpu" if gpus else "cpu")
    LOG.unlink(missing_ok=True)
    install_torch(gpus)
    present, required = installed(), wanted(groups, gpus)
    unfit = missing(required, present)
    if hosted() and "triton" in present and "triton" in unfit:
        raise SetupError(f"{environment.old_triton() or 'Triton does not fit'} ({required['triton']})")
    alone = set(requirements("unsloth")) - set(requirements())
    together = {name: item for name, item in required.items() if name not in alone}
    # In Colab and Kaggle nothing that fits may change; in an environment of our own only these two matter.
    pinned = set(present) - set(unfit) if hosted() else {"torch", "triton"} & set(present) - set(unfit)
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={present[name]}\n" for name in sorted(pinned)))
        pip(", ".join(together), *map(str, together.values()), "--constraint", str(constraints))
    if gpus:
        pip(", ".join(sorted(alone)), "--no-deps", *(str(required[name]) for name in sorted(alone)))
    after = installed()
    changed = [f"{name} {old} -> {after.get(name)}" for name, old in before.items() if after.get(name) != old]
    if hosted() and changed:
        print(f"did not fit and were changed: {', '.join(changed)}")
    verify(gpus)
    try:
        stamp_file().write_text(json.dumps([*stamps(), fingerprint(groups, gpus)]))
    except OSError as error:
        print(f"no stamp written ({error}): the next set-up will ask pip again")


def verify(gpus: list) -> None:
    """Import the main packages in a fresh Python, and check that torch sees the GPU. Raises SetupError."""
    done = subprocess.run(
        [sys.executable, "-c", VERIFY], capture_output=True, text=True, cwd=environment.ROOT
    )
    if done.returncode:
        raise SetupError(f"the installed packages do not import:\n{done.stderr.strip()}")
    versions, _, problem = done.stdout.strip().partition("\n")
    print(versions)
    if gpus and problem:
        raise SetupError(problem)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m helpers.machine.install", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--group", action="append", default=[], choices=GROUPS, help="also this group")
    parser.add_argument("--check", action="store_true", help="only say what is missing")
    options = parser.parse_args(argv)
    gpus = nvidia_gpus()
    present = installed()
    gaps = missing(wanted(options.group, gpus), present)
    if options.check:
        for name, requirement in gaps.items():
            print(f"missing: {requirement} (installed: {present.get(name, 'none')})")
        return 1 if gaps else 0
    environment.give_home()  # where pip keeps its cache
    try:
        check_machine(gpus)
        if gaps or fingerprint(options.group, gpus) not in stamps():
            install(options.group, gpus)
        else:
            print(f"nothing to install: Python {platform.python_version()}, torch {present['torch']}")
    except SetupError as error:
        print(f"\nSET-UP FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
