"""Removes secrets before anything is written to a file: keys, tokens, and logins in addresses, at any depth."""

import re
from typing import Any

import msgspec

from forebay.core.records.recording_rows import RecordedRun

# Not every ``key`` or ``token``: ``prompt_key`` names a column, ``eos_token`` the end of a text.
_is_secret_name = re.compile(
    r"""
    (.*[_.-])? ((run|access|secret|private)[_.-]?keys? | secrets? | passw(or)?ds? | passphrase | authorization
                | cookies? | credentials?
                | (auth|access|bearer|api|hf|github|wandb|refresh|session|judge)[_.-]?tokens?)
    | .*api[_.-]?keys? | token
    """,
    re.IGNORECASE | re.VERBOSE,
).fullmatch
_is_address_name = re.compile(
    r"(.*[_.-])?(.*ur[il]|addr(ess)?|endpoint|host(name)?|prox(y|ie)|webhook|server)(e?s)?", re.IGNORECASE
).fullmatch
# A scheme, a name with a port (not a time of day), or an IP address.
_holds_address = re.compile(
    r"://|(^|[\s,;@])(?=[^\s:]*[a-z.])[\w.-]+:\d{1,5}\b|\[[\da-f:]+\]|\b\d+(\.\d+){3}\b", re.IGNORECASE
).search
_login = re.compile(r"(?<=://)[^/?#\s]*@")
_key_in_query = re.compile(r"(?<=[?&])((?:api[_-]?key|access[_-]?token|key|token|password)=)[^&\s]+", re.IGNORECASE)


def without_secrets(run: RecordedRun) -> RecordedRun:
    """``run`` without secrets, safe to share.

    Fields named like a secret are removed. Addresses lose user name, password and keys in their query.
    """
    fields = {name: cleaned(getattr(run, name)) for name in run.__struct_fields__}
    return msgspec.structs.replace(run, **fields)


def cleaned(value: Any) -> Any:
    """A JSON value without its secrets."""
    if isinstance(value, dict):
        return {_text(name): cleaned(each) for name, each in value.items() if not _is_secret_name(str(name))}
    if isinstance(value, list | tuple):
        return [cleaned(each) for each in value]
    return _text(value) if isinstance(value, str) else value


def is_own_affair(name: str, value: Any) -> bool:
    """Whether a payload field has, at any depth, an address or a name like a secret's. Such fields go into no file."""
    left = [(name, value)]
    while left:  # no recursion: a file may be nested as deeply as its reader allows
        name, value = left.pop()
        if value and (_is_secret_name(name) or _is_address_name(name)) and not isinstance(value, bool):
            return True
        if isinstance(value, str) and _holds_address(value):
            return True
        if isinstance(value, dict):
            left += [*value.items(), *(("", key) for key in value)]
        elif isinstance(value, list):
            left += [("", each) for each in value]
    return False


def without_keys(path: str) -> str:
    """A request path without the values of keys in its query."""
    return _key_in_query.sub(r"\1", path)


def _text(text: str) -> str:
    """Cleans every address in a text, such as ``remote_engine_url`` or a traceback."""
    return _key_in_query.sub(r"\1", _login.sub("", text)) if "://" in text else text
