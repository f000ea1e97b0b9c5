"""nox -s lint: what the gate checks besides tests, in the environment that runs nox.

nox -s "versions(oldest)", or newest: the package and its examples in an environment of such versions. With
the newest, also the export and the switch, on the Python that runs nox: .github/workflows/newest.yml. They
download gigabytes, so nothing runs by default. Without a GPU the kernel runs in Triton's interpreter.
"""

import os
import re
import sys

import nox

nox.options.sessions = []
project = nox.project.load_toml("pyproject.toml")["project"]
NEEDED = [*project["dependencies"], *project["optional-dependencies"]["train"]]
VERSIONS = {
    "oldest": [text.replace(">=", "==") for text in NEEDED],
    "newest": [*NEEDED, *project["optional-dependencies"]["compressed"]],
}
TESTS = {
    "oldest": ["tests/nf4_triton/test_package.py"],
    "newest": ["tests/nf4_triton/test_package.py", "tests/nf4_triton/export", "tests/nf4_triton/libraries"],
}
NOTEBOOK = "build/notebook.py"  # its code: what a cell uses is used
LINT = [
    "ruff check .",
    "ruff format --check .",
    "mypy",
    "lint-imports --no-cache",
    f"jupytext --to py --output {NOTEBOOK} Unsloth_Puzzles_A.ipynb",
]
TOOLS = ["pip", "hatchling", "pytest", "pytest-timeout", "pytest-xdist", "matplotlib", "setuptools"]


@nox.session(default=False)
@nox.parametrize("python, which", [("3.10", "oldest"), (None, "newest")], ids=list(VERSIONS))
def versions(session: nox.Session, which: str) -> None:
    """Run the tests of the package, which train with the examples; with the newest versions more of them."""
    session.install(*VERSIONS[which], *TOOLS)
    options = ["-n", "2", "--dist", "worksteal", *session.posargs]
    session.run("python", "-m", "pytest", "-m", "long or not long", *options, *TESTS[which])


@nox.session(default=False, venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check formatting, types, and imports, and find code that nothing uses but tests."""
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    os.environ["PYTHONPATH"] = os.pathsep.join([".", "helpers/src"])
    for command in LINT:
        session.run(*command.split())
    found = session.run("vulture", "helpers", "examples", NOTEBOOK, silent=True, success_codes=[0, 3])
    if dead := [line for line in found.splitlines() if not re.search("unused (variable|attribute)", line)]:
        session.error("\n".join(dead))
