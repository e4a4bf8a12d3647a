"""Which of slime's two contracts a generator file follows: declared, or seen in what the file answers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from forebay.hooks.types import Contract


def declared_contract(namespace: Mapping[str, object]) -> "Contract | None":
    """What a module says in ``CONTRACT`` or ``contract``; a ``contract`` that holds anything else is its own."""
    for name in ("CONTRACT", "contract"):
        value = namespace.get(name)
        if isinstance(value, str) and value.upper() in ("A", "B"):
            return cast("Contract", value.upper())
    return None


class ContractChoice:
    """The contract of a run: declared, else seen in the first answer of ``is_valid_group``, else by what there is."""

    def __init__(self, declared: "Contract | None", *, has_validity: bool = False, has_transform: bool = False) -> None:
        self._fallback: Contract = "B" if has_transform else "A"
        self._decided = declared if declared is not None or has_validity else self._fallback

    @property
    def decided(self) -> "Contract | None":
        """The contract, or None while the first answer is awaited."""
        return self._decided

    @property
    def current(self) -> "Contract":
        """The contract, or the likelier one while the first answer is awaited."""
        return self._decided or self._fallback

    def observe(self, answer: object) -> None:
        """Decide by an answer of ``is_valid_group``, unless already decided: a pair means A, a bool B."""
        from forebay.hooks.answer_checks import is_truth  # half of what an inspection would load, which never asks

        if self._decided is None and isinstance(answer, tuple | list):
            self._decided = "A"
        elif self._decided is None and is_truth(answer):
            self._decided = "B"
