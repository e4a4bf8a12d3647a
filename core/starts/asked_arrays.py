"""Which side arrays a run asks its engines for, beside the tokens: its setting ``arrays``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from forebay.core.errors import InvalidInput

MAX_KEPT = 4_096
"""SGLang's default for ``--sampling-mask-max-tokens``: the largest ``top_k`` for which it returns sampling masks."""
# 128 is SGLang's own limit if it separates prefill and decode; it has no other limit.
NAME = re.compile("routed_experts|sampling_mask|top_logprobs:([1-9][0-9]?|1[01][0-9]|12[0-8])")
HINT = (
    "the arrays are routed_experts, sampling_mask and top_logprobs:K with K from 1 to 128; "
    'for example ["routed_experts", "top_logprobs:20"]'
)


@dataclass(frozen=True, slots=True)
class AskedArrays:
    """The arrays that engines are asked for in each call. Without any, calls are as in a run without ``arrays``."""

    routed_experts: bool = False
    """The experts that each token was routed to, in each layer."""
    sampling_mask: bool = False
    """The tokens that top-k and top-p left to draw from."""
    top_logprobs: int = 0
    """Number of most probable tokens whose logprobs are asked for; 0 for none."""

    @classmethod
    def parse(cls, names: Sequence[str] | None) -> Self:
        """Parse the setting. Raises ``InvalidInput`` for an unknown or a repeated name."""
        if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
            raise InvalidInput(f"arrays must be a list of names (got {names!r:.200})", hint=HINT, field="arrays")
        fields: dict[str, int] = {}
        for name in names or ():
            array, _, count = name.partition(":")
            if array in fields or not NAME.fullmatch(name):
                what = "must name each array once" if array in fields else "must be names of arrays"
                raise InvalidInput(f"arrays {what} (got {name!r:.200})", hint=HINT, field="arrays")
            fields[array] = int(count) if count else True
        return cls(**fields)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return self.routed_experts or self.sampling_mask or self.top_logprobs > 0


NO_ARRAYS = AskedArrays()
