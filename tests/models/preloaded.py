"""What the server of `isolation.py` imports before it forks."""

import hf_paged.engine.engine
import hf_paged.integrations.decoding
import hf_paged.integrations.generate  # noqa: F401
import tests.models.judging  # noqa: F401
