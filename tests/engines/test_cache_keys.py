"""The bookkeeping of cache keys. What they are for is tested on engines whose weights change in place."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from forebay.engines.cache_keys import MAX_REMEMBERED, CacheKeys

URL = "http://engine"


async def nobody(url: str) -> str | None:
    return None


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("hasty_threads")
def test_rollouts_in_threads_may_make_more_keys_than_are_remembered() -> None:
    keys = CacheKeys(nobody)
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(keys.of, [URL] * (4 * MAX_REMEMBERED)))
    assert keys.sent(made[0].text) is None
    assert keys.sent(keys.of(URL).text) is not None
