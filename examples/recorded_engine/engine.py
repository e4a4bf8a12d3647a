"""A scripted engine to record without a GPU; it calls the agent's tool to multiply. python engine.py [PORT]"""

import json
import re
import sys
from contextlib import suppress
from threading import Event

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine


def multiplies(call: ScriptedCall) -> Reply:
    """Call the tool first, then answer with its result."""
    if call.messages[-1]["role"] == "tool":
        return Reply(text=f"It is {call.messages[-1]['content']}.")
    a, b = map(int, re.findall(r"\d+", call.messages[0]["content"]))
    function = {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})}
    return Reply(tool_calls=[{"id": "c1", "type": "function", "function": function}])


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 30000
    with suppress(KeyboardInterrupt), ScriptedEngine(multiplies, port=port).in_thread() as engine:
        print(engine.url, flush=True)
        Event().wait()
