"""What is told of a generator file's hooks without calling any."""

from typing import Any

import pytest

from forebay.hooks.plain_functions import check_hooks


def report(source: str) -> Any:
    namespace: dict[str, Any] = {"__name__": "task_generator"}
    exec(source, namespace)
    return check_hooks(namespace)


def test_every_hook_is_listed_with_the_contracts_that_ask_it() -> None:
    found = report("def filter_item(i, t): ...\ndef transform_group(g, t): ...\ndef is_valid_group(g, n, t): ...")
    assert found.hooks == {"is_valid_group": "A, B", "filter_item": "A", "transform_group": "B"}
    assert found.problems == []


@pytest.mark.parametrize(
    ("source", "contract"),
    [
        ("", "A"),
        ("def transform_group(g, t): ...", "B"),
        ("def is_valid_group(g, n, t): ...", None),
        ("CONTRACT = 'B'\ndef is_valid_group(g, n, t): ...", "B"),
        ("contract = 'a'\ndef transform_group(g, t): ...", "A"),
        ("contract = {'parties': 2}", "A"),
    ],
)
def test_contract_is_told_where_it_is_certain(source: str, contract: str | None) -> None:
    found = report(source)
    assert found.contract == contract
    assert found.problems == []


@pytest.mark.parametrize(
    "source",
    [
        "def filter_item(sample, kind): ...",
        "async def filter_item(x, y): ...",
        "def filter_item(x, y, limit=3, *, strict=False): ...",
        "def filter_item(*everything): ...",
        "class Filter:\n  def __call__(self, a, b): ...\nfilter_item = Filter()",
        "normalize_group_data = None",
    ],
)
def test_any_names_and_extra_parameters_with_defaults_are_fine(source: str) -> None:
    assert report(source).problems == []


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def filter_item(item): ...", "filter_item(item) cannot be called as filter_item(item, task_type)"),
        ("def pad_group_data(a, b, c): ...", "cannot be called as pad_group_data(group, group_size)"),
        ("def transform_group(g, t, *, key): ...", "cannot be called as transform_group(group, task_type)"),
        ("filter_item = 3", "filter_item is of type int, not a function"),
        ("CONTRACT = 'C'", "CONTRACT is 'C'; it must be 'A' or 'B'"),
        ("def normalise_group_data(group): ...", "did you mean normalize_group_data?"),
        ("def is_valid_groups(g, n, t): ...", "did you mean is_valid_group?"),
        (
            "from forebay.hooks import hookimpl\n@hookimpl\ndef filter_item(sample): ...",
            "filter_item asks for sample; a marked hook may name: item, task_type",
        ),
    ],
)
def test_problems_say_what_is_wrong(source: str, told: str) -> None:
    assert any(told in problem for problem in report(source).problems), report(source).problems


@pytest.mark.parametrize(
    "source",
    [
        "def filter_items(items): ...",
        "def filter_items(a, b): ...\ndef run_rollout(data): filter_items(1, 2)",
        "def filter_items(a, b): ...\ndef filter_item(a, b): ...",
        "filter_items = 3",
    ],
)
def test_helpers_with_similar_names_are_no_misspelt_hooks(source: str) -> None:
    assert report(source).problems == []
