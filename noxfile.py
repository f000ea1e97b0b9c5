"""nox -s "versions(oldest)", or newest: the package and its examples in an environment of such versions.

Downloads gigabytes, so nothing runs by default. Without a GPU the kernel runs in Triton's interpreter.
"""

import nox

nox.options.sessions = []
VERSIONS = {  # the bounds in pyproject.toml, and the newest releases that were tried
    "oldest": "torch==2.8.0 bitsandbytes==0.46.0 transformers==4.56.0 peft==0.15.0 accelerate==1.10.0",
    "newest": "torch==2.15.0 bitsandbytes==0.50.2 transformers==5.23.0 peft==0.21.2 accelerate",
}


@nox.session(default=False)
@nox.parametrize("python, which", [("3.10", "oldest"), ("3.13", "newest")], ids=list(VERSIONS))
def versions(session: nox.Session, which: str) -> None:
    """Train with the examples, with the kernel and without: the same adapter, bit for bit."""
    session.install(
        *VERSIONS[which].split(), "pip", "hatchling", "pytest", "pytest-timeout", "matplotlib", "setuptools"
    )
    session.run("python", "-m", "pytest", "-m", "long or not long", "tests/nf4_triton/test_package.py")
