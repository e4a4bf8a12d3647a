"""A timeline in the published layout, ``{folder}/step_{n}/worker_{id}.jsonl``: for the scripts that read such logs.

``published_step.py`` says which lines a step has. What the layout has no words for stands in keys of its own, so that
a report of what was written is the report of what was read.
"""

from dataclasses import replace
from pathlib import Path

import msgspec

from forebay.core.errors import InvalidInput
from forebay.core.files import make_folder, opener
from forebay.telemetry.analysis.published.published_events import DRIVER, STEP_FACTS
from forebay.telemetry.analysis.timeline import ProfileStep, Timeline
from forebay.telemetry.export.published_step import LinesOfStep, facts_of, iso_time


class PublishedExport:
    """Writes one step after the other. Workers are numbered in the order in which they appear."""

    def __init__(self, folder: Path) -> None:
        if any(folder.glob("step_*")):
            raise InvalidInput(f"{folder} has a log already", hint="name a folder that is new", field="output")
        self._folder = folder
        self._workers: dict[str, int] = {}
        self._numbers: set[int] = set()
        self._last: tuple[Path, int, ProfileStep, list[str]] | None = None
        self.num_lines = 0

    def add(self, step: ProfileStep, notes: list[str] | None = None) -> Path:
        """Write a step; the folder that it is in now. ``notes`` are those of its timeline so far."""
        number = self._number(step)
        folder = self._folder / f"step_{number}"
        make_folder(folder)
        lines = LinesOfStep(step, number, self._workers)
        for worker, own in lines.by_worker():
            self._write(folder / f"worker_{worker}.jsonl", own)
        self._last = (folder, number, replace(step, requests=[]), list(notes or []))
        self._write_facts(*self._last)
        return folder

    def finish(self, notes: list[str]) -> None:
        """Write the ``notes`` that came after the last step."""
        if self._last is not None and notes != self._last[3]:
            self._write_facts(*self._last[:3], notes)

    def _number(self, step: ProfileStep) -> int:
        """As the trainer counts, where it counts; each once."""
        number = int(step.name) if step.name.isdecimal() else 0
        if not step.name.isdecimal() or number in self._numbers or number < max(self._numbers, default=0):
            number = max(self._numbers, default=-1) + 1
        self._numbers.add(number)
        return number

    def _write_facts(self, folder: Path, number: int, step: ProfileStep, notes: list[str]) -> None:
        """The last such line of a step is the one that counts."""
        line = {
            "timestamp": iso_time(step.end_s),
            "event": STEP_FACTS,
            "extra": facts_of(step) | {"notes": notes},
            "workid": int(DRIVER),
            "step": number,
        }
        self._write(folder / f"worker_{DRIVER}.jsonl", [line])

    def _write(self, path: Path, lines: list[dict[str, object]]) -> None:
        with open(path, "ab", opener=opener) as file:
            file.writelines(msgspec.json.encode(line, enc_hook=str) + b"\n" for line in lines)
        self.num_lines += len(lines)


def export_published(timeline: Timeline, folder: Path) -> int:
    """Write all steps of ``timeline``; how many lines. ``InvalidInput`` if ``folder`` has a log already."""
    export = PublishedExport(folder)
    for step in timeline.steps():
        export.add(step, timeline.notes)
    export.finish(timeline.notes)
    return export.num_lines
