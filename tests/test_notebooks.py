"""The notebooks run from top to bottom, on the embedded model and without it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "notebooks" / "01_quickstart.ipynb"

NO_EMBEDDED_MODEL = """
import hf_paged.embedded

def not_installed():
    raise hf_paged.embedded.EmbeddedModelError("The embedded model isn't installed.")

hf_paged.embedded.embedded_model_folder = not_installed
"""


def _execute(notebook: NotebookNode) -> None:
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()


def _printed(notebook: NotebookNode) -> str:
    outputs = (output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> NotebookNode:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return nbformat.read(QUICKSTART, as_version=4)


@pytest.mark.slow
def test_the_quickstart_runs_on_the_embedded_model_where_it_is_installed(quickstart: NotebookNode) -> None:
    _execute(quickstart)
    printed = _printed(quickstart)
    assert "same tokens as stock: True" in printed
    assert "one prompt at a time: 6 of 6" in printed


def test_the_quickstart_runs_without_the_embedded_model(quickstart: NotebookNode) -> None:
    quickstart.cells.insert(0, nbformat.v4.new_code_cell(NO_EMBEDDED_MODEL))
    _execute(quickstart)
    printed = _printed(quickstart)
    assert "The embedded model isn't installed." in printed
    assert "same tokens as stock: True" in printed
    assert "one prompt at a time: 6 of 6" in printed


def test_the_committed_outputs_are_of_a_whole_run_in_order() -> None:
    notebook = nbformat.read(QUICKSTART, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(output.output_type == "stream" and output.name == "stdout" for cell in code for output in cell.outputs)
    assert "million parameters" in _printed(notebook)


def test_the_committed_outputs_name_no_folder_of_the_machine_that_made_them() -> None:
    text = QUICKSTART.read_text(encoding="utf-8")
    assert not any(folder in text for folder in ("/home/", "/root/", "/tmp/", "site-packages"))
