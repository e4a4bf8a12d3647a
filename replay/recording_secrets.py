"""What no file has: keys, tokens, and the logins in addresses, however deep in a payload, or a reply, they are."""

import re
from typing import Any

import msgspec

from forebay.core.records.recording_rows import RecordedRun

# Not any ``key`` or ``token``: ``prompt_key`` names a column, ``eos_token`` what ends a text.
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
# A scheme, a name with a port (not the time of a day), or the numbers of an address.
_holds_address = re.compile(
    r"://|(^|[\s,;@])(?=[^\s:]*[a-z.])[\w.-]+:\d{1,5}\b|\[[\da-f:]+\]|\b\d+(\.\d+){3}\b", re.IGNORECASE
).search
_login = re.compile(r"(?<=://)[^/?#\s]*@")
_key_in_query = re.compile(r"(?<=[?&])((?:api[_-]?key|access[_-]?token|key|token|password)=)[^&\s]+", re.IGNORECASE)


def without_secrets(run: RecordedRun) -> RecordedRun:
    """``run`` as it may be given to others.

    Fields that are named like a secret are left out, and addresses lose user name, password and keys in their query.
    """
    fields = {name: cleaned(getattr(run, name)) for name in run.__struct_fields__}
    return msgspec.structs.replace(run, **fields)


def cleaned(value: Any) -> Any:
    """A JSON value without what is secret in it."""
    if isinstance(value, dict):
        return {_text(name): cleaned(each) for name, each in value.items() if not _is_secret_name(str(name))}
    if isinstance(value, list | tuple):
        return [cleaned(each) for each in value]
    return _text(value) if isinstance(value, str) else value


def is_own_affair(name: str, value: Any) -> bool:
    """Whether a field of a payload holds, however deep, an address or what is named like a secret: never of a file."""
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
    """The path of a request, with its query, without the values of keys in that."""
    return _key_in_query.sub(r"\1", path)


def _text(text: str) -> str:
    """Also of a text that holds several addresses, as ``remote_engine_url`` may, or a traceback."""
    return _key_in_query.sub(r"\1", _login.sub("", text)) if "://" in text else text
