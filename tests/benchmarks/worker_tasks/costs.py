"""What a passage over the rows costs the process that it is in: printed, for the log of the run."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.generators.base import BaseGenerator


@contextmanager
def costs_of_passage(generator: "BaseGenerator") -> Iterator[None]:
    cpu_s, wall_s = time.process_time(), time.monotonic()
    yield
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    told = json.dumps({"cpu_s": cpu_s, "wall_s": wall_s, "is_lead": generator.is_lead})
    print(f"{told}\n", end="", flush=True)  # in one piece: others write into the same log
