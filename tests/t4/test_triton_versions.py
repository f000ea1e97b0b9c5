"""The kernel compiles as expected with the oldest Triton, Colab's and the newest; others with -m optin."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import triton_versions  # noqa: E402

from helpers.machine import install  # noqa: E402

IN_CI = (triton_versions.OLDEST, triton_versions.COLAB, triton_versions.NEWEST_SEEN)


def check(version):
    try:
        triton_versions.install(version)
    except RuntimeError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs the package registry: {error}")
    codes, wrong = triton_versions.check(version)
    assert not wrong, "\n".join(wrong)
    assert len(codes) == 12


@pytest.mark.parametrize("version", IN_CI)
def test_oldest_colab_and_newest(version):
    check(version)


@pytest.mark.optin
@pytest.mark.parametrize("version", [v for v in triton_versions.VERSIONS if v not in IN_CI])
def test_every_other_version(version):
    check(version)


def test_the_oldest_version_is_what_the_requirements_say():
    oldest, _, _ = triton_versions.OLDEST.rpartition(".")
    assert f">={oldest}" in str(install.requirements()["triton"].specifier).split(",")
