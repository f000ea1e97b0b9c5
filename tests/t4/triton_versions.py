"""Install other Triton versions, each into a folder below the system's temporary folder, and keep them."""

import subprocess
import sys
import tempfile
from pathlib import Path

VERSIONS = tuple("3.3.0 3.3.1 3.4.0 3.5.0 3.5.1 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0 newest".split())


def install(version: str) -> Path:
    """Return the folder with this Triton, installed if necessary. RuntimeError with pip's message."""
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    folder = Path(tempfile.gettempdir()) / "nf4-triton-versions" / f"{version}-python{python}"
    if version == "newest" or not (folder / "complete").exists():
        requirement = "triton" if version == "newest" else f"triton=={version}"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps"]
        command += ["--disable-pip-version-check", "--target", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"pip could not install {requirement}: {done.stderr.strip()[-600:]}")
        (folder / "complete").touch()
    return folder
