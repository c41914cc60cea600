"""Sampling parameters of other APIs and jspec's equivalents.

Sources: OpenAI's API reference, vLLM 0.25's SamplingParams, transformers' GenerationConfig.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from jspec.errors import nearest

# By name, the text after "did you mean" in the message about it.
PEER_PARAMETERS: Mapping[str, str] = {
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_length"),
        "'max_new_tokens'",
    ),
    **dict.fromkeys(("min_tokens", "min_length"), "'min_new_tokens'"),
    **dict.fromkeys(("seed", "random_seed"), "'sampling_seed'"),
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words"), "'stop'"),
    "eos_token_id": "'stop_token_ids'",
    "include_stop_str_in_output": "'no_stop_trim'",
    "num_return_sequences": "'n'",
    **dict.fromkeys(
        ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens"),
        "'max_thinking_tokens'",
    ),
    "do_sample": "'temperature', of which 0 is greedy",
    "logprobs": "'return_logprob' and 'top_logprobs_num'",
    "prompt_logprobs": "'return_logprob' and 'logprob_start_len', 0 of which is the whole prompt",
    **dict.fromkeys(("guided_json", "response_format"), "'json_schema'"),
    "guided_regex": "'regex'",
    "guided_grammar": "'ebnf'",
    "structured_outputs": "'json_schema', 'regex', 'ebnf' or 'structural_tag'",
}


def meant_parameter(name: str, known: Collection[str]) -> str:
    """Return the intended parameter for a name that is not in `known`; empty if unclear."""
    return PEER_PARAMETERS.get(name) or nearest(name, known)
