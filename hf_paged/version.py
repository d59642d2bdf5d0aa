"""The version of the package, written once: in pyproject.toml."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

DISTRIBUTION = "hf-paged"
UNKNOWN = "0+unknown"


def find_version(project_file: Path | None = None) -> str:
    """The installed distribution's version; for a checkout that isn't installed, the one in its pyproject.toml.

    Args:
        project_file: the pyproject.toml to fall back to; by default the one next to the package.

    Returns:
        The version, or "0+unknown" where there is neither.
    """
    try:
        return installed_version(DISTRIBUTION)
    except PackageNotFoundError:
        return version_in(project_file or Path(__file__).resolve().parent.parent / "pyproject.toml")


def version_in(project_file: Path) -> str:
    """`project.version` of a pyproject.toml, "0+unknown" if there is no such file, project or version."""
    try:
        text = project_file.read_text(encoding="utf-8")
    except OSError:
        return UNKNOWN
    # Python 3.10 has no tomllib, and two patterns are cheaper than a dependency.
    project = re.search(r"^\[project\]\s*$(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    if project is None or not re.search(rf'^name\s*=\s*"{re.escape(DISTRIBUTION)}"', project[1], re.MULTILINE):
        return UNKNOWN
    found = re.search(r'^version\s*=\s*"([^"]+)"', project[1], re.MULTILINE)
    return found[1] if found else UNKNOWN


__version__ = find_version()
