"""Clients that others wrote against a running server, each from its wheel or npm package.

    python -m benchmarks.clients --folder /tmp/clients --output clients.json
    python -m benchmarks.clients openai anthropic "npm openai" --folder /tmp/clients
    python -m benchmarks.clients --url http://127.0.0.1:30000 --folder /tmp/clients

Makes an environment for each group of clients in the folder, installs the newest versions there,
serves the bundled pair on a free port unless a URL is given, and runs calls.py or calls.mjs for
each client. Writes each client's version and result, beside what the output has of others; status
1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.environment import write_result

HERE = Path(__file__).resolve().parent
# Clients whose packages can be installed together; each name is that of its package.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("openai", "anthropic", "litellm", "langchain-openai", "langchain-anthropic"),
    ("pydantic-ai-slim", "openai-agents", "llama-index-llms-openai-like"),
    ("instructor", "guidance"),
    ("lm-eval",),
    ("sglang",),
)
# Arguments of `pip install` where they are not the client's name.
REQUIREMENTS = {
    "pydantic-ai-slim": ["pydantic-ai-slim[openai]"],
    "lm-eval": ["lm-eval[api]"],
    # Its frontend language alone: the wheel's own requirements are those of its server, for CUDA.
    "sglang": ["--no-deps", "sglang"],
}
FRONTEND = ("aiohttp", "ipython", "msgspec", "numpy", "pybase64", "pydantic", "requests", "tqdm")
ALSO = {"sglang": FRONTEND}
NPM = {
    "npm openai": ["openai"],
    "npm ai": ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic"],
    "npm @anthropic-ai/sdk": ["@anthropic-ai/sdk"],
}
SECONDS = 900.0
NAMES = (*(name for group in GROUPS for name in group), *NPM)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    with nullcontext(options.url) if options.url else serving(options.port) as url:
        results = {name: run(name, options.folder, url) for name in options.names or NAMES}
    for name, result in results.items():
        print(f"{name:30} {result['version']:12} {result['error'] or 'works'}")
    if options.output is not None:
        earlier = json.loads(options.output.read_text()) if options.output.exists() else {}
        write_result(options.output, {"clients": {**earlier.get("clients", {}), **results}})
    return int(any(result["error"] for result in results.values()))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    parser.add_argument("names", nargs="*", help="clients to run; all without a name")
    parser.add_argument("--folder", type=Path, required=True, help="of the environments")
    parser.add_argument("--url", help="a running server")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"{sorted(unknown)}; expected some of {', '.join(NAMES)}")
    return options


@contextmanager
def serving(port: int) -> Iterator[str]:
    """Serve the bundled pair."""
    command = [sys.executable, "-m", "jspec.cli.main", "serve", "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        ready = next((line for line in process.stderr if "ready: " in line), None)
        assert ready is not None, "the server did not start"
        draining = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield ready.split("ready: ")[1].split()[0]
        draining.poll()
    finally:
        process.terminate()
        process.wait(60)
        process.stderr.close()


def run(name: str, folder: Path, url: str) -> dict[str, Any]:
    """Install a client and run its calls; return its version and error."""
    started = time.monotonic()
    try:
        if name in NPM:
            version, command = npm_client(name, folder.resolve() / "npm")
        else:
            version, command = python_client(name, folder.resolve())
        call([*command, url])
        error = None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as failure:
        output = failure.stderr or failure.stdout or str(failure)
        error = "\n".join(str(output).strip().splitlines()[-5:])
        version = locals().get("version", "")
    seconds, date = round(time.monotonic() - started, 1), time.strftime("%Y-%m-%d")
    return {"date": date, "version": version, "error": error, "seconds": seconds}


def python_client(name: str, folder: Path) -> tuple[str, list[str]]:
    (index,) = [i for i, group in enumerate(GROUPS) if name in group]
    environment = folder / f"python-{index}"
    python = str(environment / "bin" / "python")
    if not environment.exists():
        call([sys.executable, "-m", "venv", str(environment)])
        call([python, "-m", "pip", "install", "-q", "--upgrade", "pip"])
    for words in (REQUIREMENTS.get(name, [name]), ALSO.get(name)):
        if words:
            call([python, "-m", "pip", "install", "-q", *words])
    code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    return call([python, "-c", code]).strip(), [python, str(HERE / "calls.py"), name]


def npm_client(name: str, folder: Path) -> tuple[str, list[str]]:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "package.json").exists():
        (folder / "package.json").write_text('{"private": true}\n')
    call(["npm", "install", "--silent", *NPM[name]], folder)
    script = folder / "calls.mjs"  # beside its modules, where imports find them
    shutil.copy(HERE / script.name, script)
    package = NPM[name][0]
    found = json.loads((folder / "node_modules" / package / "package.json").read_text())
    return str(found["version"]), ["node", str(script), package]


def call(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a program to its end and return its output; raises CalledProcessError."""
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, timeout=SECONDS
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
