"""One tiny pair, and programs compiled once, for all tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tiny_models import write_tiny_pair


@pytest.fixture(scope="session")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pair = write_tiny_pair(tmp_path_factory.mktemp("pair"), max_position=512)
    return {
        "model_path": str(pair.target_path),
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(pair.draft_path),
        "max_running_requests": 2,
        "chunked_prefill_size": 32,
        "dtype": "float32",
        "compile_at_start": "first",
        "disable_radix_cache": True,
        "compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
    }
