"""Groups that slime can train on, and what its rollout function makes of them."""

from typing import Any

from forebay.client import slime
from tests.client import slime_stand_in
from tests.client.slime_stand_in import Sample
from tests.kit import Json, make_sample


def group(instance_id: str, *, count: int = 2, **changes: Any) -> list[Json]:
    tokens = {"tokens": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "logprobs": [0.0, 0.0, -0.5, -0.25]}
    return [
        make_sample(
            uid=f"{instance_id}/{slot}", instance_id=instance_id, reward=slot / (count - 1), **(tokens | changes)
        )
        for slot in range(count)
    ]


def generate(args: Any, rollout_id: int) -> list[list[Sample]]:
    """What slime makes its training data of, after its own checks."""
    output = slime.generate_rollout(args, rollout_id, object(), evaluation=False)
    slime_stand_in.train_data(args, output)
    return output.samples  # type: ignore[no-any-return]


def instances(samples: list[list[Sample]]) -> list[str]:
    return [group[0].metadata["instance_id"] for group in samples]
