"""The model in OpenVINO's own format, made once by optimum-intel and kept in the cache directory."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from hf_paged.embedded import cache_directory

NOTE = "hf_paged_export.json"


def openvino_folder(python: Path, model_folder: Path) -> tuple[Path, float]:
    """The exported model's folder, and how many seconds its export took, now or then.

    Args:
        python: the interpreter of an environment with optimum-intel.
        model_folder: what `save_pretrained` wrote.

    Raises:
        RuntimeError: the export failed; with the end of what it printed.
    """
    folder = cache_directory() / "openvino" / f"{model_folder.resolve().name}-float32"
    note = folder / NOTE
    if not note.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".export-", dir=folder.parent))
        command = [str(python), "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        options = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
        begin = time.perf_counter()
        try:
            process = subprocess.run(
                [*command, "--model", str(model_folder.resolve()), *options, str(temporary)],
                capture_output=True,
                text=True,
                check=False,
            )
            if process.returncode:
                raise RuntimeError(f"the export to OpenVINO ended with {process.returncode}:\n{process.stderr[-4000:]}")
            seconds = time.perf_counter() - begin
            (temporary / NOTE).write_text(json.dumps({"seconds": seconds}), encoding="utf-8")
            if folder.exists():
                shutil.rmtree(folder)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder, float(json.loads(note.read_text(encoding="utf-8"))["seconds"])
