"""Compiled programs on disk: each engine's own directory is used, also by a second one."""

from __future__ import annotations

from pathlib import Path

import jax

from jspec.engine.programs.compilation import enable_persistent_cache


def test_a_second_directory_in_one_process_is_used(tmp_path: Path) -> None:
    """jax opens its cache once; a directory named later must not be ignored."""
    before = jax.config.jax_compilation_cache_dir
    try:
        for number, name in enumerate(("first", "second"), start=3):
            enable_persistent_cache(tmp_path / name)
            jax.jit(lambda x, number=number: x * number + 1).lower(1.0).compile()
            assert list((tmp_path / name).iterdir()), name
    finally:
        if before is not None:
            enable_persistent_cache(Path(before))
        else:
            jax.config.update("jax_compilation_cache_dir", None)
