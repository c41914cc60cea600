"""One tiny engine and one live server for all tests of this folder.

The context is long, so that a request can outlive a test's patience; the model is random, so its
text means nothing.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine
from tests.support.tiny_models import TinyPair, write_tiny_pair

from .helpers import wait_idle

SIZE = {"max_position": 16384}
TEMPLATE = """{{ eos_token }}{% if tools %}{{ tools | tojson }}
{% endif %}{% for message in messages %}
{% if message.role not in ("system", "user", "assistant", "tool") %}
{{ raise_exception("no role " + message.role) }}
{% endif %}
<{{ message.role }}>{{ message.content }}</>
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    pair = write_tiny_pair(tmp_path_factory.mktemp("pair"), **SIZE)
    (pair.target_path / "chat_template.jinja").write_text(TEMPLATE)
    return pair


@pytest.fixture(scope="session")
def engine_arguments(tiny_pair: TinyPair, programs_of_all: Path) -> dict[str, Any]:
    return {
        "model_path": str(tiny_pair.target_path),
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(tiny_pair.draft_path),
        "max_running_requests": 2,
        "max_queued_requests": 32,
        "chunked_prefill_size": 32,
        "context_length": 16384,
        "max_total_tokens": 40000,
        "dtype": "float32",  # a GPU would choose bfloat16, in which near-ties may flip
        "compilation_cache_dir": str(programs_of_all),
    }


@pytest.fixture(scope="session")
def engine(engine_arguments: dict[str, Any]) -> Iterator[Engine]:
    with Engine(**engine_arguments) as engine:
        yield engine


@pytest.fixture(scope="session")
def live_url(engine: Engine) -> Iterator[str]:
    """Return the address of a real server on a free port."""
    config = uvicorn.Config(
        create_app(engine, ServerArgs(log_interval=0)), port=0, log_config=None, loop="asyncio"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(timeout=120)


@pytest.fixture
def client(live_url: str) -> Iterator[httpx.Client]:
    # No certificates: reading them takes longer than most tests of this folder.
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with httpx.Client(base_url=live_url, timeout=120, trust_env=False, verify=tls) as client:
        yield client
        client.post("/abort_request", json={"abort_all": True})


@pytest.fixture(scope="session")
def subprocess_env() -> dict[str, str]:
    """Return the environment in which another process finds the programs compiled by this one."""
    root = str(Path(__file__).resolve().parents[2])
    return {
        **os.environ,
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "PYTHONPATH": root,
        "PYTHONUNBUFFERED": "1",
    }


@pytest.fixture(scope="session")
def other_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_tiny_pair(tmp_path_factory.mktemp("other"), seed=5, **SIZE)


@pytest.fixture
def served(engine: Engine, tiny_pair: TinyPair) -> Iterator[Engine]:
    """Return the shared engine, and restore its own weights afterwards."""
    yield engine
    back = {"speculative_draft_model_path": str(tiny_pair.draft_path), "weight_version": "default"}
    engine.update_weights_from_disk(str(tiny_pair.target_path), abort_all_requests=True, **back)
    wait_idle(engine)
