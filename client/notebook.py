"""Batches and runs as tables in a notebook: HTML without scripts, of at most 256 KiB."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from forebay.core.outcome import reward_parts_of
from forebay.telemetry.numbers import counted
from forebay.telemetry.visible_text import visible

MAX_ROWS = 20
"""Rows of a batch that are shown, from its beginning."""
MAX_CHARS = 300
"""Characters of a text that are shown, of which HTML may make six times as many."""
HEADERS = ("instance", "uid", "reward", "advantage", "parts", "outcome", "answer")


def batch_html(caption: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The first rows of a batch: rewards, and the end of the last message."""
    caption += f", {counted(len(rows), 'row')}"
    if len(rows) > MAX_ROWS:
        caption += f", of which the first {MAX_ROWS} are shown"
    return _table(caption, HEADERS, map(_row_cells, rows[:MAX_ROWS]))


def run_html(stats: Mapping[str, Any]) -> str:
    """The state of a run, what it has produced, and what is wrong with it; ``stats`` has the fields of ``RunStats``."""
    rewards, alarm = stats["rewards"], stats["alarm"]
    facts = {
        "name": stats["name"],
        "task type": stats["task_type"],
        "state": stats["state"],
        "reason": stats["reason"],
        "alarm": alarm["message"] if alarm else "",
        "warnings": "; ".join(stats["warnings"]),
        "weight version": _number(stats["weight_version"]),
        "groups": _counts(stats["groups"]),
        "discarded": _counts(stats["discarded"]),
        "outcomes": _counts(stats["outcomes"]),
        "rewards": _numbers({name: rewards[name] for name in ("mean", "min", "max") if rewards.get("num")}),
        "reward parts": _numbers({name: part["mean"] for name, part in stats["reward_parts"].items()}),
    }
    return _table(f"Run {stats['run_id']}", (), [fact for fact in facts.items() if fact[1]])


def _row_cells(row: Mapping[str, Any]) -> list[str]:
    raw, reward = row.get("raw_reward"), row.get("reward")
    return [
        str(row.get("instance_id")),
        str(row.get("uid")),
        _number(reward if raw is None else raw),
        "" if raw is None else _number(reward),
        _numbers(reward_parts_of(row)),
        str(row.get("outcome") or ""),
        _answer(row.get("messages")),
    ]


def _answer(messages: object) -> str:
    """The end of the last message, where answers are."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    content = last.get("content") if isinstance(last, dict) else None
    text = content if isinstance(content, str) else "" if content is None else str(content)
    return f"…{text[1 - MAX_CHARS :]}" if len(text) > MAX_CHARS else text


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def _counts(values: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in values.items() if number)


def _table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in headers)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><caption>{_text(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    return f'<td style="text-align: left">{_text(text)}</td>'


def _text(text: str) -> str:
    """Text of models and users, which can neither be markup nor change the direction of what follows."""
    shown = visible(text[: MAX_CHARS + 1])
    return escape(shown if len(shown) <= MAX_CHARS else f"{shown[: MAX_CHARS - 1]}…")
