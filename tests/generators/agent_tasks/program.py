"""An agent as a program: does what its row says."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def ask(instance):
    url, model = os.environ["OPENAI_BASE_URL"], os.environ["FOREBAY_MODEL"]
    body = json.dumps({"model": model, "messages": instance["prompt"]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def main():
    instance = json.loads(Path(os.environ["FOREBAY_INSTANCE"]).read_text())
    said = ask(instance)
    if instance["do"] == "answer":
        sys.stderr.write("it begins\n" + "thinking\n" * 200)
    Path("found.json").write_text(json.dumps({"said": said, "instance": instance, "environ": dict(os.environ)}))
    print(said)
    if instance["do"] == "fail":
        sys.exit("lost the thread")
    if instance["do"] == "hang":
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        told = Path(os.environ["TELL"], "pids")
        temporary = told.with_suffix(".tmp")
        temporary.write_text(f"{os.getpid()} {child.pid}")
        temporary.rename(told)
        time.sleep(1_000)


main()
