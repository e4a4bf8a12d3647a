"""A shell agent in forty lines: it runs each fenced block that the model writes, until the model writes none.

It does not depend on Forebay: any server that speaks Chat Completions will do.
"""

import json
import os
import re
import subprocess
import urllib.request

SYSTEM = "Work in a shell. Write one ```sh block at a time, and read what it prints. Write no block once you are done."
MAX_TURNS = 6


def ask(messages):
    """The model's next message."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": os.environ["FOREBAY_MODEL"], "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""


def main():
    with open(os.environ["FOREBAY_INSTANCE"]) as instance:
        messages = [{"role": "system", "content": SYSTEM}, *json.load(instance)["prompt"]]
    for _ in range(MAX_TURNS):
        text = ask(messages)
        block = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
        if not block:
            return
        done = subprocess.run(["sh", "-c", block[1]], capture_output=True, check=False, text=True, timeout=20)
        result = f"status {done.returncode}\n{done.stdout}{done.stderr}"[:4_000]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": result}]


main()
