"""Writers and readers that load a server over HTTP while it is killed again and again, and what they were told."""

import random
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from tests.kit import TIME_LIMIT_S, Json, NativeRun, ServerProcess, make_sample

GROUP_SIZE = 4
REWARDS = (0.0, 1.0, 0.5, 0.25)


@dataclass
class Receipt:
    """A batch that arrived whole, and that the server was told is done."""

    groups: list[str]


@dataclass
class Ledger:
    """What the server acknowledged and handed out, by its clients' account."""

    acknowledged: set[str] = field(default_factory=set)
    receipts: list[Receipt] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def times_received(self) -> dict[str, list[Receipt]]:
        received: dict[str, list[Receipt]] = defaultdict(list)
        for receipt in self.receipts:
            for group in receipt.groups:
                received[group].append(receipt)
        return received


class KillLoad:
    """Threads that write and read until told to stop, through every death of the server."""

    def __init__(self, server: ServerProcess, run: NativeRun, *, num_writers: int = 4, num_readers: int = 2) -> None:
        self.ledger = Ledger()
        self._server = server
        self._path = run.path
        self._news = threading.Condition()
        self._no_more_groups = threading.Event()
        self._no_more_reads = threading.Event()
        self._writers = [threading.Thread(target=self._write, args=(n,)) for n in range(num_writers)]
        self._readers = [threading.Thread(target=self._read, args=(n,)) for n in range(num_readers)]
        for thread in (*self._writers, *self._readers):
            thread.start()

    def wait_for_acknowledgements(self, number: int) -> None:
        """Until so many more samples were acknowledged than now."""
        with self._news:
            wanted = len(self.ledger.acknowledged) + number
            if not self._news.wait_for(lambda: len(self.ledger.acknowledged) >= wanted, TIME_LIMIT_S):
                raise AssertionError(f"the server does not acknowledge:\n{self._server.log()}")

    def finish(self) -> Ledger:
        """Let the writers end with whole groups, and the readers read everything."""
        self._no_more_groups.set()
        self._join(self._writers)
        num_groups = len(self.ledger.acknowledged) // GROUP_SIZE
        with self._news:
            is_read = self._news.wait_for(lambda: len(self.ledger.times_received()) >= num_groups, TIME_LIMIT_S)
        self._no_more_reads.set()
        self._join(self._readers)
        if not is_read:
            missing = num_groups - len(self.ledger.times_received())
            raise AssertionError(f"{missing} groups never arrived:\n{self._server.log()}")
        return self.ledger

    def abandon(self) -> None:
        """Stop at once, after a failure."""
        self._no_more_groups.set()
        self._no_more_reads.set()
        self._join([*self._writers, *self._readers])

    def _join(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(TIME_LIMIT_S)
            if thread.is_alive():
                raise AssertionError("a client does not end")

    # --- in the threads

    def _write(self, number: int) -> None:
        rng = random.Random(number)
        group = 0
        with httpx.Client(timeout=5) as client:
            while not self._no_more_groups.is_set():
                instance_id = f"w{number}-{group}"
                for slot, reward in enumerate(REWARDS):
                    text = "x" * rng.choice([10, 500, 20_000])
                    place = {"instance_id": instance_id, "epoch": 0, "slot": slot}
                    sample = make_sample(uid=f"{instance_id}/{slot}", reward=reward, text=text, **place)
                    self._write_until_acknowledged(client, sample)
                group += 1

    def _write_until_acknowledged(self, client: httpx.Client, sample: Json) -> None:
        while not self._no_more_reads.is_set():
            answer = self._post(client, "samples", sample)
            if answer is not None:
                self._note(lambda: self.ledger.acknowledged.add(sample["uid"]))
                [verdict] = answer["results"]
                if not (verdict["duplicate"] or verdict["outcome"] == "member"):
                    self.ledger.broken.append(f"{sample['uid']}: {answer}")
                return

    def _read(self, name: int) -> None:
        number = 0
        with httpx.Client(timeout=5) as client:
            while not self._no_more_reads.is_set():
                request = {"num_groups": 1, "wait_s": 0.2, "request_id": f"{name}-{number}"}
                answer = self._post(client, "batches", request)
                if answer is None or answer["batch_id"] is None:
                    continue
                while self._post(client, f"batches/{answer['batch_id']}/ack", {}) is None:
                    pass
                self._receive(answer)
                number += 1

    def _receive(self, answer: Json) -> None:
        by_instance: dict[str, list[str]] = defaultdict(list)
        for row in answer["data"]:
            by_instance[row["instance_id"]].append(row["uid"])
        for instance_id, uids in by_instance.items():
            if sorted(uids) != [f"{instance_id}/{slot}" for slot in range(GROUP_SIZE)]:
                self.ledger.broken.append(f"group {instance_id} came as {uids}")
        self._note(lambda: self.ledger.receipts.append(Receipt(list(by_instance))))

    def _note(self, change: Callable[[], None]) -> None:
        with self._news:
            change()
            self._news.notify_all()

    def _post(self, client: httpx.Client, call: str, body: Json) -> Json | None:
        """The answer; None if the server is dead, or died before the last byte."""
        try:
            response = client.post(f"{self._server.url}{self._path}/{call}", json=body)
            answer: Json = response.json() if response.is_success else {}
        except (httpx.TransportError, ValueError):
            self._no_more_reads.wait(0.02)
            return None
        if not response.is_success:
            self.ledger.broken.append(f"{call}: {response.status_code} {response.text}")
        return answer or None
