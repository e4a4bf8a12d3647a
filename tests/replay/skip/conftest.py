"""Each test has a manager of its own, and the classes of roles as they were before."""

from collections.abc import Iterator

import pytest

from forebay.replay.skip import SKIP_REGISTRY, SkipManager, values


@pytest.fixture(autouse=True)
def _fresh_manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    roles = dict(SKIP_REGISTRY)
    monkeypatch.setattr(values, "_codecs", dict(values._codecs))
    monkeypatch.setattr(values, "_codecs_by_name", dict(values._codecs_by_name))
    SkipManager.init({})
    yield
    SKIP_REGISTRY.clear()
    SKIP_REGISTRY.update(roles)
    SkipManager.init({})
