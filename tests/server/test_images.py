"""Images in messages: stored once for each group, and given back to trainers as they were."""

import base64
import os
from collections.abc import Sequence

from forebay.client import BufferClient
from tests.kit import Json, NativeRun, ServerProcess, make_sample, metric

NUM_ROLLOUTS, NUM_SCREENS, NUM_SHOWN = 8, 20, 3
SCREEN_BYTES = 20_000
OTHERS = [
    "https://example.com/a.png",
    "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>",
    f"data:image/png;base64,{'é' * 5_000}",
    f"forebay-part:{'0' * 32}",
]


def shown(*urls: str) -> list[Json]:
    """A message for each image."""
    parts = ({"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls)
    return [{"role": "user", "content": [{"type": "text", "text": "what now?"}, part]} for part in parts]


def screens(*images: bytes) -> list[Json]:
    return shown(*(f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images))


def write(run: NativeRun, samples: Sequence[tuple[int, int, list[Json]]]) -> None:
    def sample(slot: int, fork: int, messages: list[Json]) -> Json:
        place = {"epoch": 0, "slot": slot, "rollout_id": f"r-{slot}", "fork": fork, "reward": float(slot % 2)}
        return make_sample(uid=f"{slot}/{fork}", instance_id="a", messages=messages, **place)

    run.send(sample(*each) for each in samples)


def test_a_screen_is_stored_once_however_many_samples_show_it(server: ServerProcess) -> None:
    run, first = server.start_run(group_size=NUM_ROLLOUTS), os.urandom(SCREEN_BYTES)
    seen = [[first, *(os.urandom(SCREEN_BYTES) for _ in range(NUM_SCREENS - 1))] for _ in range(NUM_ROLLOUTS)]
    last = NUM_SCREENS - NUM_SHOWN
    # Each turn shows the newest screens, so it is a sample of its own; the last one is the main one, with fork 0.
    turns = [(slot, (turn + 1) % (last + 1), turn) for slot in range(NUM_ROLLOUTS) for turn in range(last + 1)]
    before = metric(server, "forebay_journal_bytes")
    write(run, [(slot, fork, screens(*seen[slot][turn : turn + NUM_SHOWN])) for slot, fork, turn in turns])
    with BufferClient(server.url) as client:
        client.attach(run.run_id)
        batch = client.read(num_groups=1)
        assert batch is not None
        images = dict(zip([row["uid"] for row in batch.rows], client.images(batch, batch.rows), strict=True))
        for slot, fork, turn in turns:
            expected = [(screen, "image/png", "") for screen in seen[slot][turn : turn + NUM_SHOWN]]
            assert images.pop(f"{slot}/{fork}") == expected
        assert images == {}
        assert batch.rows[0]["messages"][0]["content"][1]["image_url"]["detail"] == "low"
    distinct = SCREEN_BYTES * (1 + NUM_ROLLOUTS * (NUM_SCREENS - 1))
    assert metric(server, "forebay_journal_bytes") - before < 1.1 * distinct


def test_small_images_and_other_addresses_stay_in_the_messages_also_in_a_replay(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    kept = [*screens(b"tiny"), *shown(*OTHERS)]
    write(run, [(slot, 0, [*kept, *screens(os.urandom(SCREEN_BYTES))]) for slot in range(2)])
    run.take(num_groups=1)
    run.stop()
    with BufferClient(server.url) as client:
        client.start(replay=run.run_id)
        batch = client.read(num_groups=1)
        assert batch is not None
        assert batch.rows[0]["messages"][:-1] == kept
        [small, *unread, large], _ = client.images(batch, batch.rows)
        assert small == (b"tiny", "image/png", "")
        assert unread == [(b"", "", url) for url in OTHERS]
        assert (large.data, large.url[:13]) == (b"", "forebay-part:")
