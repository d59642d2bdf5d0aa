"""Tables between markers: `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`."""

from __future__ import annotations

import re


def put(text: str, name: str, table: str) -> str:
    """`text` with what stands between a name's markers replaced.

    Raises:
        ValueError: not exactly one pair of markers.
    """
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if text.count(begin) != 1 or text.count(end) != 1 or not pattern.search(text):
        raise ValueError(f"the file needs {begin} and behind it {end}, each once")
    return pattern.sub(lambda _: f"{begin}\n{table}\n{end}", text)
