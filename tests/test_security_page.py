"""What docs/security.md says of routes is what the code has; tests/attack holds their keys to a real server."""

from collections.abc import Callable

import pytest

from tests import route_keys
from tests.route_keys import CONTROL_KEY, NOTHING, ROLLOUT_KEY, RUN_KEY, RUNS_GATEWAY_KEY, TOKEN, told


@pytest.mark.parametrize(
    ("heading", "routes", "keys"),
    [
        ("Routes of the server", route_keys.server_routes, {NOTHING, TOKEN, RUN_KEY}),
        ("Routes of the gateway", route_keys.gateway_routes, {NOTHING, CONTROL_KEY, RUNS_GATEWAY_KEY, ROLLOUT_KEY}),
        ("Routes of the embedded engines", route_keys.engine_routes, {NOTHING}),
    ],
)
def test_the_table_has_every_route_and_no_other(
    heading: str, routes: Callable[[], set[route_keys.ROUTE]], keys: set[str]
) -> None:
    assert set(told(heading)) == routes()
    assert set(told(heading).values()) == keys
