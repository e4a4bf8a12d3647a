"""A recorded run on the real SGLang, once more in ``forebay simulate``: with room for all, and with a tight cache."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Forebay, forebay
from tests.conftest import MakeServer
from tests.kit import poll_until, write_generator
from tests.sglang.conftest import engine_with

__all__ = ["forebay"]

pytestmark = pytest.mark.sglang

LIMIT_S = 400.0
MOST_ERROR, MOST_OFF_TOKENS = (float(os.environ.get(name, "0.5")) for name in ("MOST_ERROR", "MOST_OFF_TOKENS"))
"""Of the makespan, and of the cache. By hand, on an idle machine, MOST_ERROR=0.15 and MOST_OFF_TOKENS=0.25."""
CODE = """
from forebay.generators.base import BaseGenerator, single_turn
TASK_TYPE = "lengths"
def reward(item):
    return 1.0
def run_rollout(data):
    async def rollout(client, messages, params):
        own = data_rows[client.rollout.instance_id][client.rollout.slot]
        return await single_turn(client, messages, {**params, "max_tokens": own})
    import json
    data_rows = {}
    with open(data["input_file"]) as file:
        for line in file:
            row = json.loads(line)
            data_rows[row["instance_id"]] = row["lengths"]
    generator = BaseGenerator.from_payload(data)
    return generator.entry(data["input_file"], rollout, reward)
"""


def rows_of(num: int) -> str:
    """Prompts of about 60 tokens, answers of 40 to 400."""
    draw = random.Random(5)
    rows = []
    for number in range(num):
        mean = draw.lognormvariate(5.0, 0.5)
        lengths = [max(30, min(400, round(draw.gauss(mean, 0.3 * mean)))) for _ in range(4)]
        rows.append({"instance_id": f"i{number}", "prompt": f"{number} " + "word " * 40, "lengths": lengths})
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@pytest.mark.parametrize("kv_tokens", [None, 1_200])
def test_a_simulation_takes_as_long_as_the_run_did(
    forebay: Forebay,
    make_server: MakeServer,
    sglang_python: str,
    sglang_model: Path,
    tmp_path: Path,
    kv_tokens: int | None,
) -> None:
    write_generator(tmp_path / "tasks", CODE, "lengths_generator.py")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows_of(10))
    server = make_server(generators=tmp_path / "tasks")
    flags = [] if kv_tokens is None else ["--max-total-tokens", str(kv_tokens)]
    with engine_with(sglang_python, sglang_model, tmp_path / "engine.log", *flags) as url:
        sampling: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}
        fields = {"remote_engine_url": url, "input_file": str(rows), "num_process": 12, "sampling_params": sampling}
        warm = server.start_run("lengths", group_size=1, **fields)
        poll_until(lambda: warm.view()["state"] in ("finished", "failed"), LIMIT_S)
        run = server.start_run("lengths", group_size=4, **fields)
        poll_until(lambda: run.view()["state"] in ("finished", "failed"), LIMIT_S)
    outcome = forebay("simulate", run.run_id, "--url", server.url, "--json", "--seeds", 1)
    assert outcome.code == 0, outcome.err
    told = json.loads(outcome.out)
    print(
        json.dumps({"load": os.getloadavg(), **{name: told[name] for name in ("answers", "run", "fit", "self_check")}})
    )
    assert told["answers"]["num_answers"] == 40
    assert abs(told["self_check"]["error"]) <= MOST_ERROR
    cost = next(iter(told["fit"]["costs"].values()))
    if kv_tokens is None:
        assert cost["kv_tokens"] is None
    else:
        assert told["fit"]["waiting_share"] > 0
        assert cost["kv_tokens"] == pytest.approx(kv_tokens, rel=MOST_OFF_TOKENS)
