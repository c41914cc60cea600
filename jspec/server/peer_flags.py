"""What flags of other servers are called here, for who writes them by habit. Data alone.

Source: vLLM 0.25's `vllm serve --help`. SGLang's names are jspec's own (flag_table.py).
"""

from __future__ import annotations

from collections.abc import Mapping

# A flag of vLLM's, and what to write instead.
OF_VLLM: Mapping[str, str] = {
    "--gpu-memory-utilization": "write --mem-fraction-static",
    "--max-num-seqs": "write --max-running-requests",
    "--max-model-len": "write --context-length",
    "--max-num-batched-tokens": "write --chunked-prefill-size",
    "--block-size": "write --page-size",
    "--tokenizer": "write --tokenizer-path",
    "--seed": "write --random-seed",
    "--speculative-config": "write --speculative-algorithm and its flags, jspec serve --help",
    "--speculative-model": "write --speculative-draft-model-path",
    "--num-speculative-tokens": "write --speculative-num-steps",
    "--generation-config": "write --sampling-defaults",
    "--uvicorn-log-level": "write --log-level",
    "--enforce-eager": "leave it out: every step is a compiled program",
    "--enable-prefix-caching": "leave it out: the prefix cache is on",
    "--no-enable-prefix-caching": "write --disable-radix-cache",
    "--enable-chunked-prefill": "leave it out: prompts are read in chunks",
    "--no-enable-chunked-prefill": "write --chunked-prefill-size",
    "--disable-log-requests": "leave it out: requests are not logged unless --log-requests says so",
    "--swap-space": "leave it out: pages are not swapped to the host",
    "--download-dir": "write --model-path: models are directories, and nothing is downloaded",
}


def advice(flag: str) -> str:
    """What to write instead of another server's flag; empty for one that is not known."""
    return OF_VLLM.get(flag, "")
