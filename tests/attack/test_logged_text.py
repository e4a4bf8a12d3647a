"""What a model, an engine or a sample says stands in no log of the server, nor of its gateway."""

import json
import shutil
from pathlib import Path

from tests.attack.hostile_engine import ABORTED, healthy_chat, hostile_engine
from tests.conftest import MakeServer
from tests.generators.agent_kit import start, stored
from tests.kit import Json, ServerProcess, make_group, poll_until, write_generator

SECRET = "xylophone-under-water"
WAYS = ("chat", "messages", "responses", "chat_stream", "messages_stream", "responses_stream", "completions", "tokens")
HOOKS = """
TASK_TYPE = "quoting"
def run_rollout(data):
    import time
    time.sleep(3600)
def filter_item(item, task_type):
    raise ValueError("cannot judge: " + str(item))
def get_group_data_meta_info(temp_data):
    raise KeyError(str(temp_data))
"""
RAISING = f'''
TASK_TYPE = "raising"
def run_rollout(data):
    raise ValueError("{SECRET[:9]}" + "{SECRET[9:]}")
'''


def told(**message: object) -> bytes:
    """A whole reply whose message has these fields."""
    chat = healthy_chat()
    chat["choices"][0]["message"] |= {"content": SECRET, **message}
    return json.dumps(chat).encode()


def bodies() -> dict[str, bytes]:
    call = {"id": "c", "index": 0, "function": {"name": SECRET, "arguments": '{"a": "' + SECRET}}
    return {
        "secret_html": f"<html>{SECRET}</html>".encode(),
        "secret_no_json": told()[:-3],
        "secret_choices": json.dumps({"choices": SECRET}).encode(),
        "secret_call": told(tool_calls=[call]),
        "secret_call_list": told(tool_calls=[SECRET]),
        "secret_content": told(content={"text": SECRET}),
        "secret_error": json.dumps({"error": {"message": SECRET}}).encode(),
        "secret_chunk": b"data: " + told() + b"\n\ndata: [DONE]\n\n",
        "secret_chunk_error": b'data: {"error": {"message": "' + SECRET.encode() + b'"}}\n\n',
        "secret_answer": told(),
    }


def assert_unsaid(server: ServerProcess) -> None:
    assert not [line for line in server.log().splitlines() if SECRET in line or SECRET[10:] in line]


def test_what_an_engine_answers_is_in_no_log(make_server: MakeServer, tmp_path: Path) -> None:
    tasks = shutil.copytree(Path(__file__).parent / "hostile_tasks", tmp_path / "hostile")
    server = make_server(generators=tasks, log_level="debug")
    answers = bodies()
    modes = [*answers, *(ABORTED + mode for mode in answers), ABORTED + "healthy"]
    rows: list[Json] = [{"do": mode, "prompt": f"do: {mode}", "label": "1"} for mode in modes]
    with hostile_engine(bodies=answers) as engine:
        for way in WAYS:
            run = start(server, tmp_path, "hostile_agent", engine.url, rows, way=way, max_attempts=1, num_process=32)
            samples = [sample for group in stored(run).values() for sample in group]
            assert len(samples) == len(modes)
            if way == "chat":  # it is kept where it belongs
                assert SECRET in json.dumps(samples)
            assert_unsaid(server)


def test_what_a_hook_or_a_generator_quotes_is_in_no_log(make_server: MakeServer) -> None:
    server = make_server(log_level="debug", max_restarts=1)
    write_generator(server.generators, HOOKS, "quoting_generator.py")
    write_generator(server.generators, RAISING, "raising_generator.py")
    run = server.start_run("quoting", group_size=2)
    for number in range(25):
        run.write(*[{**sample, "response": SECRET} for sample in make_group(number, [0.5, 1.0])])
    run.read(num_groups=1, wait_s=1)
    details = [group["detail"] for group in run.groups(state="discarded")]
    assert any(SECRET in detail for detail in details)
    poll_until(lambda: "finished groups were lost so far" in server.log())
    raising = server.start_run("raising", group_size=2)
    assert SECRET in raising.wait_for_state("failed")["reason"]
    assert "; restart in" in server.log()
    assert "hook filter_item failed with ValueError" in server.log()
    assert_unsaid(server)
