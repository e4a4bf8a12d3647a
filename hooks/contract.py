"""Which of slime's two contracts a generator file follows: declared, or inferred from its answers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from forebay.hooks.types import Contract


def declared_contract(namespace: Mapping[str, object]) -> "Contract | None":
    """Return the contract declared in ``CONTRACT`` or ``contract``. Other values of ``contract`` are ignored."""
    for name in ("CONTRACT", "contract"):
        value = namespace.get(name)
        if isinstance(value, str) and value.upper() in ("A", "B"):
            return cast("Contract", value.upper())
    return None


class ContractChoice:
    """The contract of a run: declared, or inferred from the first answer of ``is_valid_group``, or from the hooks."""

    def __init__(self, declared: "Contract | None", *, has_validity: bool = False, has_transform: bool = False) -> None:
        self._fallback: Contract = "B" if has_transform else "A"
        self._decided = declared if declared is not None or has_validity else self._fallback

    @property
    def decided(self) -> "Contract | None":
        """The contract; None until the first answer."""
        return self._decided

    @property
    def current(self) -> "Contract":
        """The contract; until the first answer, the likelier one."""
        return self._decided or self._fallback

    def observe(self, answer: object) -> None:
        """Infer the contract from an answer of ``is_valid_group``, unless decided: a pair means A, a bool means B."""
        from forebay.hooks.answer_checks import is_truth  # inspections do not need this, and it doubles their imports

        if self._decided is None and isinstance(answer, tuple | list):
            self._decided = "A"
        elif self._decided is None and is_truth(answer):
            self._decided = "B"
