"""nox -s "versions(oldest)", or newest: the package and its examples in an environment of such versions.

With the newest also the export and the switch, on the Python that runs nox: .github/workflows/newest.yml.
Downloads gigabytes, so nothing runs by default. Without a GPU the kernel runs in Triton's interpreter.
"""

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
TOOLS = ["pip", "hatchling", "pytest", "pytest-timeout", "pytest-xdist", "matplotlib", "setuptools"]


@nox.session(default=False)
@nox.parametrize("python, which", [("3.10", "oldest"), (None, "newest")], ids=list(VERSIONS))
def versions(session: nox.Session, which: str) -> None:
    """Run the tests of the package, which train with the examples; with the newest versions more of them."""
    session.install(*VERSIONS[which], *TOOLS)
    options = ["-n", "2", "--dist", "worksteal", *session.posargs]
    session.run("python", "-m", "pytest", "-m", "long or not long", *options, *TESTS[which])
