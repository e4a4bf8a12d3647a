"""The answers of a rollout, for calls that continue one by ``previous_response_id``."""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.gateway.dialects.errors import ProtocolRefused
from forebay.gateway.dialects.history import Fields


@dataclass(frozen=True, slots=True)
class _Stored:
    response: Fields
    input_items: Sequence[Fields]


def _is_reference(item: Fields) -> bool:
    # OpenAI's client omits the type of a reference.
    return item.get("type") == "item_reference" or set(item) == {"id"}


class ResponseStore:
    """Keeps each answer with the new items of its request; a conversation is a chain of answers.

    One store per rollout: an id gives no access to another rollout, and the store is freed with the rollout.
    """

    def __init__(self) -> None:
        self._stored: dict[str, _Stored] = {}

    def add(self, response: Fields, input_items: Sequence[Fields]) -> None:
        """Store an answer and the new items of its request."""
        self._stored[response["id"]] = _Stored(response, self.resolved(input_items))

    def get(self, response_id: str) -> Fields:
        """Return the answer with this id. Raises ``ProtocolRefused`` with a 404."""
        return self._entry(response_id).response

    def input_items(self, response_id: str) -> list[Fields]:
        """Return the new items of the answer's request. Raises ``ProtocolRefused``."""
        return list(self._entry(response_id).input_items)

    def delete(self, response_id: str) -> Fields:
        """Delete an answer and return the reply. Answers that continue it can then no longer be continued."""
        del self._stored[self._entry(response_id).response["id"]]
        return {"id": response_id, "object": "response", "deleted": True}

    def history(self, response_id: str | None) -> list[Fields]:
        """Return every item up to and including this answer, oldest first. Raises ``ProtocolRefused``."""
        # Each answer refers to the previous one: follow the chain backwards.
        turns: list[list[Fields]] = []
        while response_id:
            entry = self._entry(response_id)
            turns.append([*entry.input_items, *entry.response["output"]])
            response_id = entry.response["previous_response_id"]
        return [item for turn in reversed(turns) for item in turn]

    def resolved(self, items: Sequence[Fields]) -> list[Fields]:
        """Replace item references by the items of stored answers. Raises ``ProtocolRefused``."""
        return [self._item(str(item.get("id"))) if _is_reference(item) else item for item in items]

    def _item(self, item_id: str) -> Fields:
        for entry in self._stored.values():
            for item in entry.response["output"]:
                if item["id"] == item_id:
                    return dict(item)
        raise ProtocolRefused(f"Item with id '{item_id}' not found.", param="input", status=404)

    def _entry(self, response_id: str) -> _Stored:
        if response_id not in self._stored:
            message = f"Response with id '{response_id}' not found."
            raise ProtocolRefused(message, param="response_id", status=404)
        return self._stored[response_id]
