"""A copy of results/ to write to."""

import shutil

import pytest

from helpers.results import store


@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copytree(store.root(), tmp_path / "results")
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path / "results"))
    return tmp_path
