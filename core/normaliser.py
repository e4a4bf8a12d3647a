"""The formulas that make advantages of rewards, by name.

Apart from the other settings of a run: hook hosts need it, and pydantic would be most of what they load.
"""

from typing import Literal

Normaliser = Literal["grpo", "rloo", "dr_grpo"]
