"""A verifier as a program: does what its row says."""

import json
import sys
from pathlib import Path

item = json.load(sys.stdin)
found = json.loads(Path("found.json").read_text())
if item["do"] == "break_judge":
    raise ValueError("the verifier is broken")
if item["do"] == "mumble":
    print("perhaps")
else:
    assert "label" not in found["instance"], "an agent must not see the label"
    assert found["environ"]["COLOUR"] == "blue"
    assert "FOREBAY_SECRET" not in found["environ"]
    assert item["agent"]["output"].strip() == found["said"] == item["messages"][-1]["content"]
    print("looks good")
    print(json.dumps({"reward": float(item["label"])}))
