"""Selects the steps and requests of a report that are shown individually: the most interesting ones."""

from dataclasses import dataclass

from forebay.telemetry.analysis.report import ProfileReport
from forebay.telemetry.render.blocks import Cell, RichCell

MOST_STEPS = 60
"""Limit of steps shown individually. Pictures and tables over all steps include the others."""
MOST_OUTLIERS = 60
"""Limit of requests shown individually."""


@dataclass(frozen=True, slots=True)
class ReportSelection:
    """The steps and requests of a report that are shown individually, with their anchors."""

    steps: dict[str, str]
    """Anchors by step name."""
    requests: dict[str, str]
    """Anchors by request id."""
    first_step: str = ""
    """The step that is shown first."""

    def link(self, text: str, *, step: str = "", request: str = "") -> Cell:
        """``text`` with a link to the request, else to the step, else without a link."""
        return RichCell(text, self.requests.get(request) or self.steps.get(step, ""))


def chosen(report: ProfileReport) -> ReportSelection:
    """Select the steps and requests of greatest interest."""
    named = [finding.path.step for finding in report.findings] + [each.step for each in report.outliers]
    slowest = sorted(report.steps, key=lambda step: (not step.is_outlier, -step.seconds))
    wanted = dict.fromkeys([*(name for name in named if name), *(step.name for step in slowest)])
    names = set(list(wanted)[:MOST_STEPS])
    in_order = [step.name for step in report.steps if step.name in names]
    costly = sorted(report.outliers, key=lambda each: -each.beyond_s)[:MOST_OUTLIERS]
    requests = {each.request: f"request-{index}" for index, each in enumerate(costly)}
    return ReportSelection(
        {name: f"step-{index}" for index, name in enumerate(in_order)}, requests, next(iter(wanted), "")
    )
