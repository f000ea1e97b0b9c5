"""What results/ holds, and a copy of it to write to."""

import shutil

import pytest

from helpers.results import store


@pytest.fixture(scope="session")
def stored():
    return {card: store.rows(card) for card in store.cards()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copytree(store.root(), tmp_path / "results")
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path / "results"))
    return tmp_path
