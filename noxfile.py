"""nox -s versions: the version matrix, one environment a version. Opt-in: it downloads gigabytes of wheels.

    nox -s "versions(bitsandbytes-0.49.2)"    one of them; nox --list names all
    python tests/nf4/one_version.py --table   afterwards: the rows into docs/compatibility.md

Without a GPU the kernel runs in Triton's interpreter. Python versions are those nox finds on the machine.
"""

import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tests" / "nf4"))
from one_version import MATRIX  # noqa: E402

nox.options.sessions = []  # nothing by default
# What must come along so that an old release meets the releases of its time.
BESIDE = {
    ("bitsandbytes", "0.45.5"): ["transformers<5", "torch<2.9"],
    ("peft", "0.15.2"): ["transformers<4.58"],
    ("peft", "0.16.0"): ["transformers<4.58"],
    ("peft", "0.17.1"): ["transformers<4.58"],
}
LIBRARIES = ("torch", "bitsandbytes", "peft", "transformers", "accelerate")
CASES = [
    nox.param(name, version, id=f"{name}-{version}")
    for name, versions in MATRIX.items()
    for version in versions
    if name != "python"
]


def measure(session: nox.Session, varied: str, packages: list[str]) -> None:
    session.install(*packages)
    row = ["tests/nf4/one_version.py", "--varied", varied, "--into", "results/version-matrix.json"]
    session.run("python", *row, env={"HF_HUB_OFFLINE": "1"}, success_codes=[0, 1])  # 1: stored as a problem


@nox.session(python="3.11", default=False)
@nox.parametrize("name, version", CASES)
def versions(session: nox.Session, name: str, version: str) -> None:
    """A training step with one package at one version, the others as new as fits."""
    others = [one for one in LIBRARIES if one != name]
    if name == "triton":  # a torch built for a GPU brings its own: this one replaces it
        session.install(*LIBRARIES)
        session.install("--no-deps", f"triton=={version}")
        measure(session, name, ["packaging"])
    else:
        measure(session, name, [f"{name}=={version}", *others, *BESIDE.get((name, version), [])])


@nox.session(python=list(MATRIX["python"]), default=False)
def pythons(session: nox.Session) -> None:
    """A training step on each Python, everything else as new as fits."""
    measure(session, "python", list(LIBRARIES))
