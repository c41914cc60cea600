"""Servers around an engine that answers with given text, one for each format; and templates with
tools like those of the formats' models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.text.calls import deepseek, gpt_oss

HERMES_TEMPLATE = """{% if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if thinking is defined and not thinking %}<think>

</think>

{% endif %}{% endif %}"""
LLAMA_TEMPLATE = """{% for message in messages %}<|start_header_id|>{{
"ipython" if message.role == "tool" else message.role }}<|end_header_id|>

{% if tools and loop.last %}Functions: {{ tools | tojson }}
{% endif %}{% if message.tool_calls %}{"name": "{{ message.tool_calls[0].function.name
}}", "parameters": {{ message.tool_calls[0].function.arguments | tojson }}}{% else %}{{
message.content }}{% endif %}<|eot_id|>{% endfor %}{% if add_generation_prompt
%}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
HARMONY_TEMPLATE = """{% if tools %}<|start|>developer<|message|>namespace functions {
{% for tool in tools %}type {{ tool.function.name }} = {{
(tool.function.parameters or {}) | tojson }};
{% endfor %}}<|end|>{% endif %}{% for message in messages %}{% if message.role == "tool"
%}<|start|>functions.x to=assistant<|channel|>commentary<|message|>{{ message.content }}<|end|>{%
elif message.tool_calls %}<|start|>assistant to=functions.{{ message.tool_calls[0].function.name
}}<|channel|>commentary json<|message|>{{ message.tool_calls[0].function.arguments | tojson
}}<|call|>{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{%
endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
MISTRAL_TEMPLATE = """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif
%}{% for message in messages %}{% if message.role == "user" %}[INST]{{ message.content }}[/INST]{%
elif message.role == "tool" %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]{% elif
message.tool_calls %}[TOOL_CALLS]{% for call in message.tool_calls %}{{ call.id }}{{ call.function |
tojson }}{% endfor %}{% else %}{{ message.content }}{% endif %}{% endfor %}"""
# It adds the arguments to text, like DeepSeek's own templates.
DEEPSEEK_TEMPLATE = """{% if tools %}## Tools
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}{% endif %}{% for message in messages %}{% if message.role == "user" %}{{
"<｜User｜>" + message.content }}{% elif message.role == "tool" %}{{
"<｜tool▁output▁begin｜>" + message.content + "<｜tool▁output▁end｜>" }}{% else %}{{
"<｜Assistant｜></think>" + message.content }}{% for call in message.tool_calls or [] %}{{
"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" + call.function.name + "<｜tool▁sep｜>" +
call.function.arguments + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>" }}{% endfor %}{% endif
%}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜></think>{% endif %}"""
# By --tool-call-parser: special tokens of such a tokenizer, and its template.
SPECIAL: Mapping[str, tuple[str, ...]] = {
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    "mistral": ("[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "qwen3_coder": ("<|im_start|>", "<|im_end|>"),
    "glm45": ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    "minimax-m2": ("<|im_start|>", "<|im_end|>", "<minimax:tool_call>", "</minimax:tool_call>"),
    "deepseekv3": ("<｜User｜>", "<｜Assistant｜>", *deepseek.MARKERS),
    "deepseekv31": ("<｜User｜>", "<｜Assistant｜>", *deepseek.MARKERS),
    "deepseekv32": ("<｜User｜>", "<｜Assistant｜>", "｜DSML｜"),
    "gpt-oss": (*gpt_oss.MARKERS, "<|constrain|>", "<|stray|>"),
}
TEMPLATES: Mapping[str, str] = {
    "qwen": HERMES_TEMPLATE,
    "qwen3_coder": HERMES_TEMPLATE,
    "glm45": HERMES_TEMPLATE,
    "minimax-m2": HERMES_TEMPLATE,
    "deepseekv3": HERMES_TEMPLATE,
    "deepseekv31": DEEPSEEK_TEMPLATE,
    "deepseekv32": HERMES_TEMPLATE,
    "llama3": LLAMA_TEMPLATE,
    "mistral": MISTRAL_TEMPLATE,
    "gpt-oss": HARMONY_TEMPLATE,
}
# The text of a model of the format that calls get_weather for Paris.
ARGUMENTS = '{"city": "Paris é"}'
CALLS: Mapping[str, str] = {
    "qwen": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3": f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis é\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm45": "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris é</arg_value>\n"
    "</tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris é'
    "</parameter>\n</invoke>\n</minimax:tool_call>",
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    f"{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseekv32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris é</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "gpt-oss": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    f"{ARGUMENTS}<|call|>",
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
