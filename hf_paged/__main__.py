"""`python -m hf_paged` is the command `hf-paged`."""

from __future__ import annotations

from hf_paged.cli import main

if __name__ == "__main__":
    main()
