"""nox -s "versions(oldest)", or newest: the package and its examples in an environment of such versions.

Downloads gigabytes, so nothing runs by default. Without a GPU the kernel runs in Triton's interpreter.
"""

import nox

nox.options.sessions = []
project = nox.project.load_toml("pyproject.toml")["project"]
NEEDED = [*project["dependencies"], *project["optional-dependencies"]["train"]]
VERSIONS = {
    "oldest": [text.replace(">=", "==") for text in NEEDED],
    "newest": NEEDED,
}


@nox.session(default=False)
@nox.parametrize("python, which", [("3.10", "oldest"), ("3.13", "newest")], ids=list(VERSIONS))
def versions(session: nox.Session, which: str) -> None:
    """Train with the examples, with the kernel and without: the same adapter, bit for bit."""
    session.install(
        *VERSIONS[which], "pip", "hatchling", "pytest", "pytest-timeout", "matplotlib", "setuptools"
    )
    session.run("python", "-m", "pytest", "-m", "long or not long", "tests/nf4_triton/test_package.py")
