from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import hf_paged
from hf_paged import version

ROOT = Path(__file__).resolve().parent.parent


def _not_installed(name: str) -> str:
    raise PackageNotFoundError(name)


def test_the_version_is_written_once_and_is_what_the_package_says() -> None:
    assert version.version_in(ROOT / "pyproject.toml") == hf_paged.__version__


def test_a_checkout_that_is_not_installed_reads_its_pyproject(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "installed_version", _not_installed)
    assert version.find_version() == version.version_in(ROOT / "pyproject.toml") != version.UNKNOWN


def test_the_metadata_of_an_installed_package_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(version, "installed_version", lambda name: f"9.9 of {name}")
    assert version.find_version(tmp_path / "none.toml") == "9.9 of hf-paged"


@pytest.mark.parametrize(
    "text",
    [
        "",
        '[project]\nname = "hf-paged"\n',
        '[project]\nname = "other"\nversion = "1.0"\n',
        '[tool.x]\nname = "hf-paged"\nversion = "1.0"\n',
        '[project]\nname = "hf-paged"\n[tool.x]\nversion = "1.0"\n',
    ],
)
def test_another_pyproject_gives_no_version(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert version.version_in(tmp_path / "pyproject.toml") == version.UNKNOWN


def test_without_a_pyproject_there_is_no_version(tmp_path: Path) -> None:
    assert version.version_in(tmp_path / "pyproject.toml") == version.UNKNOWN
