"""Arrays per token of a real mixture of experts: as the engine tells them, and as samples have them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.engines.arrays_flows import LONG, RecordedArrays, said, stage_before, user
from tests.sglang.partial_kit import changed_weights, put_weights, until_in_the_middle

pytestmark = pytest.mark.sglang


@pytest.fixture
def arrays_engine(moe_engine: str) -> str:
    return moe_engine


class TestReal(RecordedArrays):
    pass


@pytest.mark.parametrize("mode", ["in_place", "abort", "retract"])
async def test_rows_before_a_change_of_weights_are_the_old_ones_or_missing(
    moe_engine: str, moe_model: Path, tmp_path: Path, mode: str
) -> None:
    new_weights = changed_weights(moe_model, tmp_path / "new")
    async with stage_before(moe_engine, tmp_path, is_agent=False) as stage:

        async def across_a_change(client: Any) -> None:
            answer = asyncio.create_task(said(client, [user("begin")], **LONG))
            await until_in_the_middle(moe_engine, 1)
            await stage.engine.post("/pause_generation", mode=mode)
            changed = {"model_path": str(new_weights), "weight_version": "2", "flush_cache": False}
            await stage.engine.post("/update_weights_from_disk", **changed)
            await stage.engine.post("/continue_generation")
            await answer

        await put_weights(moe_engine, moe_model, 1)
        recorded = await stage.recorded(across_a_change)
        await put_weights(moe_engine, moe_model, 1)
        (sample,), (rows,) = recorded.samples, recorded.routes
        _, old, new = sample["token_spans"]
        assert (old["weight_version"], new["weight_version"]) == (1, 2)
        first = new["start"] - 1 if mode == "retract" else 0
        assert list(rows) == list(range(first, len(sample["tokens"]) - 1))
        kept = await stage.routes_of(sample["tokens"][: new["start"]])
        assert [at for at, row in enumerate(kept) if mode != "retract" and row != rows[at]] == []
