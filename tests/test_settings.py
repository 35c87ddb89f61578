"""The SDACCEL_* variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sdaccel import settings
from sdaccel.errors import SettingError

CODE = Path(settings.__file__).parent


def test_defaults_without_environment(monkeypatch):
    for setting in settings.TABLE:
        monkeypatch.delenv(setting.name, raising=False)
        assert setting.value() == setting.default


def test_the_environment_wins_and_blanks_do_not_count(monkeypatch):
    monkeypatch.setenv("SDACCEL_THREADS", " 3 ")
    assert settings.THREADS.value() == 3
    monkeypatch.setenv("SDACCEL_THREADS", "  ")
    assert settings.THREADS.value() == 0
    monkeypatch.setenv("SDACCEL_STORE", "a b/é")
    assert settings.STORE.value() == Path("a b/é")


@pytest.mark.parametrize("text", ["-1", "two", "1.5"])
def test_a_value_that_cannot_be_used_is_named_with_what_is_allowed(monkeypatch, text):
    monkeypatch.setenv("SDACCEL_THREADS", text)
    with pytest.raises(SettingError, match=f"SDACCEL_THREADS='{text}' is not a whole number"):
        settings.THREADS.value()


def test_every_variable_that_the_code_reads_is_in_the_table():
    names = {setting.name for setting in settings.TABLE}
    for path in CODE.rglob("*.py"):
        used = set(re.findall(r"""environ[^\n]*["'](SDACCEL_[A-Z]+)""", path.read_text(encoding="utf-8")))
        assert used <= names, path
    assert all(re.fullmatch(r"SDACCEL_[A-Z_]+", name) for name in names)


@pytest.mark.parametrize("text", ["0", "-1", "few"])
def test_an_engine_keeps_a_graph_at_least(monkeypatch, text):
    monkeypatch.setenv("SDACCEL_GRAPHS", text)
    with pytest.raises(SettingError, match=f"SDACCEL_GRAPHS='{text}' is not a number from 1"):
        settings.GRAPHS.value()
