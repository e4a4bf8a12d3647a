"""What passes between the lead of a run and one of its workers, batch by batch."""

import time

from forebay.workers.rollouts.mailbox import BATCH_EVERY_S, Mailbox
from forebay.workers.rollouts.messages import SampleJudged, for_lead


async def test_a_busy_worker_sends_what_it_has_to_say_in_few_batches() -> None:
    mail = Mailbox()
    sent, begun_s = [], time.monotonic()
    for number in range(4):
        mail.post(SampleJudged(f"first of {number}"))
        mail.post(SampleJudged(f"second of {number}"))
        sent.append(for_lead(await mail.news()))
    assert [[message.uid for message in batch] for batch in sent] == [
        [f"first of {number}", f"second of {number}"] for number in range(4)
    ]
    assert time.monotonic() - begun_s >= 3 * 0.9 * BATCH_EVERY_S  # the first one goes at once
