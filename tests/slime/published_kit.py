"""A folder laid out like slime's checkout, with generators as people have written them for it."""

from pathlib import Path

SLIMES_LINE = "from slime_plugins.rollout_buffer.generator.base_generator import BaseGenerator, query_single_turn"
OUR_LINE = "from forebay.generators.base import BaseGenerator, query_single_turn"

SLIMES_OWN_BASE = """
from slime.rollout.rm_hub import get_reward
TASK_TYPE = "math"
def run_rollout(data): ...
"""

# Worker processes, queues, the class's client and its write: none of it is known to Forebay.
WORKERS = f"""
import copy, json, os, time, uuid
from functools import partial
from multiprocessing import get_context

{SLIMES_LINE}
from generator.scoring import score
from slime_plugins.rollout_buffer.generator.prompts.words import as_prompt

TASK_TYPE = "workers"
SAMPLING_PARAMS = {{"top_p": 1}}


def work(tasks, done, rollout_func, reward_func, client, sampling_params):
    for item in iter(tasks.get, "STOP"):
        messages, finish_reason = rollout_func(client, as_prompt(item["prompt"]), sampling_params)
        item["messages"] = messages
        done.put({{
            "uid": item.pop("uid"),
            "instance_id": item.pop("instance_id"),
            "messages": messages,
            "reward": reward_func(item),
            "extra_info": {{**item, "finish_reason": finish_reason, "timestamp": str(time.time())}},
        }})
    done.put("COMPLETE")


class WorkersGenerator(BaseGenerator):
    def __init__(
        self, remote_engine_url, remote_buffer_url, num_repeat_per_sample=1, queue_size=1000000, num_process=10,
        task_type="math", max_tokens=4096, num_repeats=1, skip_instance_ids=None, method="fork",
    ):
        super().__init__(
            remote_engine_url, remote_buffer_url, num_repeat_per_sample, queue_size, num_process, task_type, max_tokens,
            num_repeats, skip_instance_ids,
        )
        self.context = get_context(method)

    def run(self, input_file, rollout_func, reward_func):
        tasks, done = self.context.Queue(maxsize=self.queue_size), self.context.Queue(maxsize=self.queue_size)
        SAMPLING_PARAMS["max_tokens"] = self.max_tokens
        workers = [
            self.context.Process(
                target=partial(work, client=self.client, sampling_params=SAMPLING_PARAMS),
                args=(tasks, done, rollout_func, reward_func),
            )
            for _ in range(self.num_process)
        ]
        for worker in workers:
            worker.start()
        for item in map(json.loads, open(input_file)):
            for _ in range(self.num_repeat_per_sample):
                if item["instance_id"] in self.skip_instance_ids:
                    self.skip_instance_ids.remove(item["instance_id"])
                    continue
                tasks.put(copy.deepcopy(item) | {{"uid": str(uuid.uuid4())}})
        for _ in workers:
            tasks.put("STOP")
        num_finished = 0
        while num_finished < len(workers):
            item = done.get()
            if item == "COMPLETE":
                num_finished += 1
                continue
            self.send_data_to_buffer(item)
            crash_at(item["instance_id"])
        return "finished"


def crash_at(instance_id):
    marker = os.environ.get("CRASH_ONCE_AT_B", "")
    if marker and instance_id == "b" and not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(3)


def run_rollout(data):
    SAMPLING_PARAMS.update(data["sampling_params"])
    generator = WorkersGenerator(
        data["remote_engine_url"],
        data["remote_buffer_url"],
        num_repeat_per_sample=int(data["num_repeat_per_sample"]),
        num_process=int(data.get("num_process", 100)),
        max_tokens=int(data["sampling_params"]["max_tokens"]),
        task_type=data["task_type"],
        skip_instance_ids=data.get("skip_instance_ids", None),
        method=data.get("method", "fork"),
    )
    generator.entry(data["input_file"], query_single_turn, score, int(data.get("num_epoch", 1)))


def filter_item(item, task_type):
    from generator.scoring import is_usable
    return is_usable(item)
"""

# Its own loop over epochs around the class's own pass, and a rollout that asks the class's client something besides.
EPOCHS = f"""
{SLIMES_LINE}
from scoring import score

TASK_TYPE = "epochs"


class EpochsGenerator(BaseGenerator):
    def entry(self, input_file, rollout_func, reward_func, num_epoch=1):
        self.said = [self.run(input_file, rollout_func, reward_func) for _ in range(num_epoch)]

    def rollout(self, client, messages, sampling_params):
        hint = self.client.chat.completions.create(model="custom", messages=[{{"role": "user", "content": "hint"}}])
        messages = messages + [{{"role": "system", "content": hint.choices[0].message.content}}]
        return query_single_turn(client, messages, sampling_params)

    def reward(self, item):
        return score(item)


def run_rollout(data):
    generator = EpochsGenerator(
        data["remote_engine_url"], data["remote_buffer_url"], int(data["num_repeat_per_sample"]),
        skip_instance_ids=data.get("skip_instance_ids"),
    )
    generator.entry(data["input_file"], generator.rollout, generator.reward, int(data["num_epoch"]))
    assert generator.said == ["finished"] * int(data["num_epoch"])
"""

SCORING = """
def score(item):
    return float(len(item["messages"][-1]["content"]) % 2)
def is_usable(item):
    return item["reward"] is not None
"""
WORDS = """
def as_prompt(prompt):
    return [{"role": "user", "content": prompt}]
"""


def write_checkout(root: Path) -> Path:
    """Write it below ``root``; its folder of generators, in which one line of each file is changed."""
    plugin = root / "slime" / "slime_plugins" / "rollout_buffer"
    files = {
        plugin / "buffer.py": "raise SystemExit('the buffer of slime')\n",
        plugin / "generator" / "base_generator.py": SLIMES_OWN_BASE,
        plugin / "generator" / "scoring.py": SCORING,
        plugin / "generator" / "prompts" / "words.py": WORDS,
        plugin / "generator" / "workers_generator.py": WORKERS.replace(SLIMES_LINE, OUR_LINE),
        plugin / "generator" / "epochs_generator.py": EPOCHS.replace(SLIMES_LINE, OUR_LINE),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return plugin / "generator"
