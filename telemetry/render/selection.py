"""Which steps and requests of a report are shown one by one: those that a reader will look for first."""

from dataclasses import dataclass

from forebay.telemetry.analysis.report import Finding, ProfileReport
from forebay.telemetry.render.blocks import Cell, LinkCell

MOST_STEPS = 60
"""Steps that are shown one by one; the pictures and tables over all steps have the others too."""
MOST_OUTLIERS = 60
"""Requests that are shown one by one."""


@dataclass(frozen=True, slots=True)
class ReportSelection:
    """Which steps and requests of a report are shown one by one, and where."""

    steps: dict[str, str]
    """Anchors, by a step's name."""
    requests: dict[str, str]
    """Anchors, by a request's id."""
    first_step: str = ""
    """The one that a reader will look for first."""

    def link(self, text: str, *, step: str = "", request: str = "") -> Cell:
        """``text``, leading to the request, else to the step, else nowhere."""
        return LinkCell(text, self.requests.get(request) or self.steps.get(step, ""))


def chosen(report: ProfileReport) -> ReportSelection:
    """The steps and requests that a reader will look for first."""
    named = [finding.path.step for finding in ranked(report)] + [each.step for each in report.outliers]
    slowest = sorted(report.steps, key=lambda step: (not step.is_outlier, -step.seconds))
    wanted = dict.fromkeys([*(name for name in named if name), *(step.name for step in slowest)])
    names = set(list(wanted)[:MOST_STEPS])
    in_order = [step.name for step in report.steps if step.name in names]
    costly = sorted(report.outliers, key=lambda each: -each.beyond_s)[:MOST_OUTLIERS]
    requests = {each.request: f"request-{index}" for index, each in enumerate(costly)}
    return ReportSelection(
        {name: f"step-{index}" for index, name in enumerate(in_order)}, requests, next(iter(wanted), "")
    )


def ranked(report: ProfileReport) -> list[Finding]:
    """Its findings, the costliest first."""
    return sorted(report.findings, key=lambda finding: -finding.seconds)
