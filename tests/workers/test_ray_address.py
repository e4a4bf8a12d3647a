"""What is said before Ray is asked; needs no Ray."""

import sys

import pytest

from forebay.core.errors import InvalidInput, MissingExtra
from forebay.workers.backends import ray_cluster
from forebay.workers.backends.by_name import make_backend


def test_ray_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match="ray is not installed") as missing:
        make_backend("ray")
    assert missing.value.hint == "pip install 'forebay[ray]'"


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "http://10.0.0.1", "head", "head:", ":6379", "head:port"])
def test_what_is_no_address_of_a_cluster_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput, match="is not an address of a Ray cluster") as refused:
        ray_cluster.check_address(address)
    assert refused.value.field == "ray_address"
    assert "HOST:PORT" in refused.value.hint


@pytest.mark.parametrize("address", ["local", "auto"])
def test_ray_s_own_words_are_addresses(address: str) -> None:
    ray_cluster.check_address(address)
