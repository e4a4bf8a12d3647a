import math
import random
from collections import Counter

import pytest

from forebay.engines.fake_sglang.calls import SamplingParams, TokenChoice
from forebay.engines.tiny.batch import pick_tokens
from forebay.engines.tiny.extra import require
from forebay.engines.tiny.rows import new_dice

PROBABILITIES = [0.5, 0.25, 0.15, 0.1]


def pick(params: SamplingParams, dice: random.Random, num_top: int = 0) -> TokenChoice:
    logits = require("torch").tensor([PROBABILITIES]).log()
    (token,) = pick_tokens(logits, [params], [dice], [num_top])
    return token


def frequencies(**settings: float) -> dict[int, float]:
    dice = random.Random(0)
    params = SamplingParams(max_tokens=1, **settings)  # type: ignore[arg-type]  # a test names float and int settings
    counted = Counter(pick(params, dice).token_id for _ in range(2000))
    return {token: count / 2000 for token, count in counted.items()}


def test_tokens_come_as_often_as_the_model_says() -> None:
    assert frequencies() == pytest.approx(dict(enumerate(PROBABILITIES)), abs=0.04)


def test_temperature_sharpens() -> None:
    squares = [p**2 / sum(q**2 for q in PROBABILITIES) for p in PROBABILITIES]
    assert frequencies(temperature=0.5) == pytest.approx(dict(enumerate(squares)), abs=0.04)


def test_top_k_and_top_p_exclude_the_tail_and_share_the_rest() -> None:
    halves = {0: pytest.approx(2 / 3, abs=0.04), 1: pytest.approx(1 / 3, abs=0.04)}
    assert frequencies(top_k=2) == halves
    assert frequencies(top_p=0.7) == halves
    assert frequencies(top_k=3, top_p=0.75) == halves


def test_top_p_keeps_the_most_probable_token_however_small_it_is() -> None:
    assert frequencies(top_p=1e-9) == {0: 1.0}


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 1}])
def test_greedy_takes_the_most_probable_token(settings: dict[str, float]) -> None:
    assert frequencies(**settings) == {0: 1.0}


def test_a_logprob_is_that_of_the_unfiltered_distribution_at_the_temperature() -> None:
    token = pick(SamplingParams(max_tokens=1, top_k=1), random.Random(0), num_top=2)
    assert token.logprob == pytest.approx(math.log(0.5), abs=1e-6)
    assert [token_id for token_id, _ in token.top] == [0, 1]
    assert [logprob for _, logprob in token.top] == pytest.approx([math.log(0.5), math.log(0.25)], abs=1e-6)


def test_a_row_draws_the_same_token_whatever_its_neighbours_ask() -> None:
    logits = require("torch").randn(8, 50)
    plain, filtered = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, top_p=0.5, temperature=0.7)
    alone = [pick_tokens(logits[row : row + 1], [plain], [new_dice(7, row)], [0])[0].token_id for row in (0, 1)]
    beside = pick_tokens(logits, [plain, plain] + [filtered] * 6, [new_dice(7, row) for row in range(8)], [0] * 8)
    assert [token.token_id for token in beside[:2]] == alone


def test_each_choice_of_a_seed_has_its_own_dice() -> None:
    assert new_dice(3, 0).random() == new_dice(3, 0).random()
    assert len({new_dice(seed, index).random() for seed in (3, 4) for index in (0, 1)}) == 4
    assert new_dice(None, 0).random() != new_dice(None, 0).random()
