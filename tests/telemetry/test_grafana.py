"""The dashboard in ``docs/grafana.json``: Prometheus can read its expressions, and the server has their metrics."""

import json
from pathlib import Path

import promql_parser
from prometheus_client.parser import text_string_to_metric_families

from forebay.telemetry.metrics import COUNTERS, GAUGES
from tests.kit import ServerProcess

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
"""What Prometheus appends to a family's name, by its type."""


def names_and_labels(expression: str) -> list[tuple[str, set[str]]]:
    """The metrics of an expression, each with the labels that it selects or groups by."""
    selectors: dict[str, set[str]] = {}
    grouped: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            selectors[node.name or ""] = {matcher.name for matcher in node.matchers.matchers}
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(expression.replace("$__rate_interval", "5m")), visit)
    return [(name, labels | grouped) for name, labels in selectors.items()]


def test_the_dashboard_asks_for_each_metric_that_the_server_has_and_for_no_other(server: ServerProcess) -> None:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked = [each for expression in expressions for each in names_and_labels(expression)]
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    family_of = {family.name + suffix: family.name for family in families for suffix in SUFFIXES[family.type]}
    assert {family_of.get(name, name) for name, _ in asked} == set(family_of.values())
    for name, labels in asked:
        _, own = (COUNTERS | GAUGES).get(family_of[name], ("", ("le",)))
        assert labels - {"instance"} <= set(own), name


def test_each_panel_has_its_own_place_and_number() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
