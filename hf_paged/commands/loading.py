"""A model and its tokenizer, from a folder or from the embedded one."""

from __future__ import annotations

import contextlib
import logging as standard_logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_paged.commands.console import err
from hf_paged.embedded import embedded_model_folder
from hf_paged.errors import ConfigError

EMBEDDED = "embedded"


def model_folder(name: str) -> Path:
    """The folder that a `--model` option names.

    Args:
        name: a folder that `save_pretrained` wrote, or "embedded".

    Raises:
        ConfigError: there is no model in that folder.
        EmbeddedModelError: the embedded model isn't installed.
    """
    if name == EMBEDDED:
        with err.status("Preparing the embedded model (the first time takes some seconds)"):
            return embedded_model_folder()
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{name} holds no config.json; give a folder that save_pretrained wrote, or 'embedded'.")
    return folder


def load_model(name: str) -> tuple[Any, Any]:
    """The causal language model in its own dtype, on the accelerator if there is one, and its tokenizer.

    Args:
        name: as for `model_folder`.

    Raises:
        ConfigError: there is no model in that folder, or it can't be loaded.
    """
    folder = model_folder(name)
    with err.status(f"Loading {name}"), _quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} can't be loaded as a causal language model: {error}") from error
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        return model.eval().to(device), tokenizer


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    # Its bars and advice would break the status line.
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(standard_logging.ERROR)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
