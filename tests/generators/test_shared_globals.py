"""Which globals that ``run_rollout`` sets and a hook reads are found, and that nothing else is."""

from pathlib import Path
from textwrap import dedent

import pytest

from forebay.generators.discovery.shared_globals import shared_globals
from forebay.hooks.specs import NOTIFICATIONS, READ_HOOKS

HOUSE = Path(__file__).parents[2]
SHIPPED = sorted([*(HOUSE / "generators").glob("*.py"), *(HOUSE / "examples").rglob("*.py")])
HOOKS = (*READ_HOOKS, *NOTIFICATIONS)


def found(source: str) -> list[tuple[str, str, int, int]]:
    told = shared_globals(dedent(source), HOOKS)
    return [(each.hook, each.name, each.read_line, each.set_line) for each in told]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(HOUSE)))
def test_nothing_shipped_has_one(path: Path) -> None:
    assert shared_globals(path.read_bytes(), HOOKS) == []


@pytest.mark.parametrize(
    ("setting", "reading"),
    [
        ("global X; X = data", "X"),
        ("global X; X += 1", "X + 1"),
        ("X['a'] = 1", "X.get('a')"),
        ("X['a']['b'] = 1", "X['a']"),
        ("del X['a']", "'a' in X"),
        ("X.append(1)", "len(X)"),
        ("X.update(data)", "X['a']"),
        ("X.setdefault('a', []).append(1)", "X['a']"),
        ("X['a'].append(1)", "X['a']"),
        ("X.flag = True", "X.flag"),
        ("X['a'] = 1", "X.pop('a')"),
        ("fill(X)\n    X.clear()", "sorted(X)"),
        ("[X.append(n) for n in range(3)]", "[x for x in X]"),
        ("run(lambda: X.append(1))", "any(x for x in X)"),
    ],
)
def test_ways_to_set_and_to_read(setting: str, reading: str) -> None:
    source = (
        f"X = {{}}\ndef run_rollout(data):\n    {setting}\ndef filter_item(item, task_type):\n    return {reading}\n"
    )
    set_line = 3 + setting.count("\n")
    assert found(source) == [("filter_item", "X", 5 + setting.count("\n"), set_line)]


def test_classes_objects_and_functions_in_variables_are_followed() -> None:
    source = """
        from shared import SEEN, helper
        class Scores:
            best = {}
            def __init__(self): self.values = []
            def note(self, value): self.values.append(value)
            def top(self): return max(self.values)
        class Job:
            def run(self):
                SCORES.note(1)
                Scores.best["a"] = 1
                SEEN.add(1)
        SCORES = Scores()
        STEPS = {"run": Job}
        def run_rollout(data):
            STEPS["run"]().run()
        async def is_valid_group(group, size, task_type):
            return SCORES.top() > 1, True
        filter_item = lambda item, task_type: item in SEEN
        def group_closed(reason):
            print(Scores.best)
    """
    assert [each[:2] for each in found(source)] == [
        ("is_valid_group", "SCORES"),
        ("filter_item", "SEEN"),
        ("group_closed", "Scores.best"),
    ]


CACHE = "X = {}\ndef parse(t):\n    if t not in X:\n        X[t] = int(t)\n    return X[t]\n"
LAZY = "X = None\ndef parse(t):\n    global X\n    X = X or t\n    return X\n"


@pytest.mark.parametrize(
    ("defined", "done", "answered"),
    [
        pytest.param("X = 3", "print(X)", "len(item) < X", id="constant"),
        pytest.param("def score(x): return x", "score(1)", "score(item)", id="function"),
        pytest.param("import random", "random.seed(1)", "random.random()", id="module"),
        pytest.param("X = {}", "X = {}; X['a'] = 1", "X", id="a local of run_rollout"),
        pytest.param("X = {}", "[data for X in data]", "X", id="a local of a comprehension"),
        pytest.param("X = {}", "X['a'] = 1", "[X for X in item]", id="a local of the hook"),
        pytest.param("X = []", "X.append(1); print(X)", "True", id="read by no hook"),
        pytest.param("X = []\ndef unused(): X.append(1)", "pass", "X", id="set by what is not called"),
        pytest.param("X = []\ndef note(x): X.append(x)", "note(1)", "note(item) or True", id="written by both"),
        pytest.param(CACHE, "parse('1')", "parse(item['t'])", id="cache"),
        pytest.param(LAZY, "parse('1')", "parse(item['t'])", id="made when first needed"),
        pytest.param("X = {}", "pass", "X.setdefault(item['uid'], len(X))", id="kept by hooks alone"),
        pytest.param("X = {}\nX['a'] = 1\nX.update(b=2)", "print(X)", "X", id="set at the import"),
        pytest.param("X = {}", "run(lambda X: X.update(a=1))", "X", id="a parameter"),
    ],
)
def test_no_false_alarm(defined: str, done: str, answered: str) -> None:
    source = (
        f"{defined}\ndef run_rollout(data):\n    {done}\ndef filter_item(item, task_type):\n    return {answered}\n"
    )
    assert found(source) == []


def test_several_are_told_by_hook_and_name() -> None:
    source = """
        A, B = [], []
        def run_rollout(data):
            B.append(1); A.append(1)
        def filter_item(item, task_type):
            return A and B
        def batch_delivered(num_rows):
            print(A)
    """
    assert [each[:2] for each in found(source)] == [
        ("filter_item", "A"),
        ("filter_item", "B"),
        ("batch_delivered", "A"),
    ]
