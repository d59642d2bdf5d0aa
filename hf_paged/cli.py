"""The command `hf-paged`. Its options are in `hf_paged.commands.app`, what each command does in a file beside it."""

from __future__ import annotations

import importlib.util
import sys

# Not part of the core's dependencies: they come with the extra "cli".
NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"The command line needs {' and '.join(missing)}: pip install 'hf-paged[cli]'")
    from hf_paged.commands.app import run

    run()
