"""The command `hf-paged`. Its options are in `hf_paged.commands.app`, what each command does in a file beside it."""

from __future__ import annotations

import gc
import importlib.util
import sys

# Not part of the core's dependencies: they come with the extra "cli".
NEEDED = ("typer", "rich")

# Allocations between two searches for garbage, 700 by default in Python 3.11. Importing torch and Transformers leaves
# hundreds of thousands of objects behind, and looking through them while they are made is a tenth of the start.
ALLOCATIONS_PER_COLLECTION = 100_000


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"The command line needs {' and '.join(missing)}: pip install 'hf-paged[cli]'")
    gc.set_threshold(ALLOCATIONS_PER_COLLECTION)
    from hf_paged.commands.app import run

    run()
