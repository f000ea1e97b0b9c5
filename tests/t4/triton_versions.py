"""Cross-compile the kernel with other Triton versions: `python tests/t4/triton_versions.py [VERSION ...]`.

Each version is installed into a folder of its own outside the repository, below the temporary folder of the
system, and kept for the next run; no GPU is needed. "newest" is the newest release. No arguments: VERSIONS.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from helpers.t4 import cross_compile, sass  # noqa: E402

VERSIONS = tuple("3.3.0 3.3.1 3.4.0 3.5.0 3.5.1 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0 newest".split())
OLDEST, COLAB, NEWEST_SEEN = "3.3.0", "3.6.0", "3.9.0"
STAGED = (3, 4)  # from here on code2 goes through shared memory, and no load waits for another
ARCHS = (75, 80, 90)


def install(version: str) -> Path:
    """The folder with this Triton, installed there if it is not yet. RuntimeError with pip's words."""
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


def check(version: str) -> tuple[list[sass.Code], list[str]]:
    """(one row a kernel, what is wrong in words) of every dtype and card, compiled by this Triton."""
    requests = [
        cross_compile.Request(arch, dtype, nested)
        for arch in ARCHS
        for dtype in cross_compile.DTYPES
        for nested in (True, False)[: 2 if arch == 75 else 1]
    ]
    codes, wrong = [], []
    with mock.patch.dict(os.environ, PYTHONPATH=str(install(version))):
        compiled = cross_compile.build(requests)
    for built in compiled:
        code = sass.code_of(built)
        codes.append(code)
        where = f"Triton {version}, sm_{code.arch}, {code.label} {code.dtype}"
        missed = code.missed
        if not built.error:
            if version != "newest" and not built.triton.startswith(version):
                wrong.append(f"{where}: compiled by {built.triton} instead")
            if tuple(map(int, built.triton.split(".")[:2])) < STAGED:
                missed = [text for text in missed if "loaded behind a wait" not in text]
            missed = missed + _mnemonics(built.ptx, code)
        wrong += [f"{where}: {reason}" for reason in missed]
    return codes, wrong


def _mnemonics(ptx: str, code: sass.Code) -> list[str]:
    """What the PTX should show and does not, or should not and does."""
    expected = [f".target sm_{code.arch}", "shfl.sync.idx.b32", "mul.rn.ftz.f32", "st.global.cs"]
    expected += ["add.rn.f32"] if code.nested else []
    expected += ["prmt.b32"] if code.dtype != "float32" else []
    absent = ["fma.rn"]
    if code.arch < 80:
        expected.append("evict_first")
        absent.append(".bf16")
    elif code.dtype == "bfloat16":
        expected.append("cvt.rn.bf16")
    missing = [f"{text} is not in the PTX" for text in expected if text not in ptx]
    return missing + [f"{text} is in the PTX" for text in absent if text in ptx]


def main(versions: list[str]) -> int:
    """Print a table a version. 1 when something is wrong with any."""
    failed = []
    for version in versions or VERSIONS:
        try:
            codes, wrong = check(version)
        except RuntimeError as error:
            codes, wrong = [], [f"Triton {version}: {error}"]
        print(sass.report(codes))
        print("\n".join(wrong) or f"Triton {version}: as expected", flush=True)
        failed += wrong
    return int(bool(failed))


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main(sys.argv[1:]))
