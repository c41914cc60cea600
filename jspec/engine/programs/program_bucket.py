"""A bucket that shares compiled programs between machines: gs://BUCKET/PATH, through gcsfs.

Failures are only warnings. Fetched programs are executed: the bucket must be as trustworthy as the
code.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jspec.errors import ConfigError

log = logging.getLogger(__name__)
GS = "gs://"


@dataclass(frozen=True, slots=True)
class ProgramBucket:
    """A bucket at gs://BUCKET/PATH, which need not exist yet."""

    url: str

    @classmethod
    def named(cls, url: str) -> ProgramBucket:
        """Return a bucket. Raises ConfigError without a name, or if gcsfs is not installed."""
        if not url.removeprefix(GS).strip("/"):
            raise ConfigError(f"compilation_cache_dir is {url!r}; expected {GS}BUCKET/PATH")
        try:
            importlib.import_module("gcsfs")
        except ImportError:
            raise ConfigError(
                f"compilation_cache_dir is {url!r}: a bucket is read and written by gcsfs, which "
                "is not installed; expected a directory of this machine, or "
                "pip install 'jspec[gs]'"
            ) from None
        return cls(url)

    @property
    def directory(self) -> Path:
        digest = hashlib.sha256(self.url.strip("/").encode()).hexdigest()[:12]
        return Path.home() / ".cache" / "jspec" / "programs-of-buckets" / digest

    def fetch(self, path: Path) -> None:
        """Download the program of this name, unless it exists here or does not exist there."""
        if path.exists():
            return
        part: Path | None = None
        try:
            files = _files()
            if not files.exists(self._place(path)):
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
            os.close(handle)
            part = Path(name)
            files.get_file(self._place(path), str(part))
            part.replace(path)
        except Exception as error:  # gcsfs and its dependencies raise many kinds
            log.warning("%s could not be read: %r", self._place(path), error)
        finally:
            if part is not None:
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)

    def keep(self, path: Path) -> None:
        try:
            _files().put_file(str(path), self._place(path))
        except Exception as error:
            log.warning("%s could not be written: %r", self._place(path), error)

    def _place(self, path: Path) -> str:
        return f"{self.url.removeprefix(GS).strip('/')}/{path.name}"


def _files() -> Any:
    return importlib.import_module("gcsfs").GCSFileSystem()
