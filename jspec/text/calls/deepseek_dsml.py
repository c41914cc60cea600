"""DeepSeek-V3.2's tool calls, in its own markup, DSML.

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>

An empty line before the block is part of it. A value with string="true" is text, exactly as
written; one with string="false" is JSON. Source: the checkpoint's encoding/encoding_dsv32.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from jspec.text.calls.xml_calls import NAME, XmlCallParser, XmlMarks

DSML = "｜DSML｜"
MARKS = XmlMarks(
    open=f"<{DSML}function_calls>",
    head=(f"<{DSML}invoke name=", NAME, ">"),
    key=(f"<{DSML}parameter name=", NAME, ">"),
    value_end=f"</{DSML}parameter>",
    call_end=f"</{DSML}invoke>",
    close=f"</{DSML}function_calls>",
    has_several=True,
    lead="\n\n",
    has_padded_values=False,
)
# The name ends at its quote; `read_head` has removed the quotes around the whole.
_TYPED = re.compile(r'([^"]+)"\s+string="(true|false)')


class DsmlParser(XmlCallParser):
    """Parses these calls. Without a `string` attribute, the tool's schema determines the type."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names, MARKS)

    def _typed(self, key: str) -> tuple[str, bool]:
        found = _TYPED.fullmatch(key)
        return (found[1], found[2] == "true") if found else super()._typed(key)
