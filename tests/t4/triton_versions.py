"""Cross-compile the kernel with other Triton versions: `python tests/t4/triton_versions.py [VERSION ...]`.

Each version is installed into a folder of its own outside the repository, below the temporary folder of the
system, and kept for the next run; no GPU is needed. "newest" is the newest release. No arguments: VERSIONS.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from helpers.t4 import cross_compile, machine_code, sass  # noqa: E402

VERSIONS = (
    "3.3.0",
    "3.3.1",
    "3.4.0",
    "3.5.0",
    "3.5.1",
    "3.6.0",
    "3.7.0",
    "3.7.1",
    "3.8.0",
    "3.9.0",
    "newest",
)
OLDEST, NEWEST_SEEN = VERSIONS[0], "3.9.0"
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


def check(version: str) -> tuple[list[dict], list[str]]:
    """(one row a kernel, what is wrong in words) of every dtype and card, compiled by this Triton."""
    requests = [
        {"source": "ours", "arch": arch, "out_dtype": dtype, "nested": True}
        for arch in ARCHS
        for dtype in sass.DTYPES
    ]
    rows, wrong = [], []
    for request, built in zip(requests, cross_compile.build(requests, str(install(version))), strict=True):
        arch, dtype = request["arch"], request["out_dtype"]
        where = f"Triton {version}, sm_{arch}, {dtype}"
        if built.error:
            wrong.append(f"{where}: did not compile: {built.error.splitlines()[-1][:300]}")
            continue
        used = built.versions["triton"]
        if version != "newest" and not used.startswith(version):
            wrong.append(f"{where}: compiled by {used} instead")
        counted = machine_code.count_cubin(
            built.name,
            built.cubin,
            built.shared,
            built.num_warps * 32,
            sass.ITEMSIZE[dtype],
            8 * built.constexprs["WORDS"],
        )
        row = sass.Row("ours", where, dtype, True, counted)
        if arch == 75:
            wrong += [f"{where}: {reason}" for reason in sass.over_budget(row, dtype) if dtype in sass.BUDGET]
        if counted.spills:
            wrong.append(f"{where}: {counted.spills} spills")
        wrong += [f"{where}: {reason}" for reason in _mnemonics(built.ptx, arch, dtype)]
        rows.append(
            {
                "triton": used,
                "arch": arch,
                "dtype": dtype,
                "instructions": counted.per_element()["total"],
                "registers": counted.registers,
                "shared": counted.shared,
                "stores": sorted(counted.widths("STG")),
            }
        )
    return rows, wrong


def _mnemonics(ptx: str, arch: int, dtype: str) -> list[str]:
    """What the PTX should show and does not, or should not and does."""
    expected = [f".target sm_{arch}", "shfl.sync.idx.b32", "mul.rn.ftz.f32", "add.rn.f32", "st.global.cs"]
    expected += ["prmt.b32"] if dtype != "float32" else []
    absent = ["fma.rn"]
    if arch < 80:
        expected.append("evict_first")
        absent.append(".bf16")
    elif dtype == "bfloat16":
        expected.append("cvt.rn.bf16")
    missing = [f"{text} is not in the PTX" for text in expected if text not in ptx]
    return missing + [f"{text} is in the PTX" for text in absent if text in ptx]


def main(versions: list[str]) -> int:
    """Print a line a kernel. 1 when something is wrong with any."""
    failed = []
    for version in versions or VERSIONS:
        try:
            rows, wrong = check(version)
        except RuntimeError as error:
            rows, wrong = [], [f"Triton {version}: {error}"]
        for row in rows:
            stores = "/".join(map(str, row["stores"]))
            print(
                f"Triton {row['triton']:8} sm_{row['arch']} {row['dtype']:9} {row['instructions']:5.2f} "
                f"instructions per element, {row['registers']} registers, {row['shared']} B shared, "
                f"stores of {stores} bits"
            )
        print("\n".join(wrong) or f"Triton {version}: as expected", flush=True)
        failed += wrong
    return int(bool(failed))


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main(sys.argv[1:]))
