"""From addresses to an engine."""

from collections.abc import Sequence

from forebay.engines.pool import EnginePool


def connect(urls: str | Sequence[str], *, api_key: str | None = None, model: str | None = None) -> EnginePool:
    """The engine at one address, or a pool of several (a list, or one text with commas between).

    Nothing is asked yet: enter it with ``async with``. Whether an address is an SGLang server, an SGLang router or any
    other OpenAI-compatible server is found out when it first answers, so it may be started later.
    """
    listed = urls.split(",") if isinstance(urls, str) else urls
    return EnginePool([url.strip() for url in listed if url.strip()], api_key=api_key, model=model)
