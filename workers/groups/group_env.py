"""Which variables a worker group may add to those of its workers."""

from collections.abc import Mapping

from forebay.core.errors import InvalidInput

SYSTEM_VARIABLES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
"""What says where a process stands in its group: of each worker another value, and nobody's choice."""
SYSTEM_PREFIXES = ("RAY_", "TORCHELASTIC_")
"""Set by Ray, and by torch's launcher, for processes of their own."""


def checked_env(env: Mapping[str, str] | None) -> dict[str, str]:
    """A copy. Raises ``InvalidInput``, by name, for a variable of the system, and for what cannot be a variable."""
    for name, value in (env or {}).items():
        if name in SYSTEM_VARIABLES or str(name).startswith(SYSTEM_PREFIXES):
            raise InvalidInput(
                f"{name} is a variable of the system, and not to be set",
                field=f"env.{name}",
                hint="a worker has its place as self.rank, self.world_size, self.local_rank",
            )
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise InvalidInput(f"{name!r} is no name of a variable", field="env", hint="a string without '='")
        if not isinstance(value, str) or "\0" in value:
            raise InvalidInput(f"{name} is {value!r}", field=f"env.{name}", hint="a variable is a string")
    return dict(env or {})
