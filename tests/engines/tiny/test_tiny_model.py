import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.core.errors import InvalidInput, MissingExtra
from forebay.engines.tiny import model as tiny_model
from forebay.engines.tiny.extra import require, torch_threads
from forebay.engines.tiny.model import LoadedModel, build_tokenizer, default_folder, ensure_model, load_model
from forebay.engines.tiny.recipe import Recipe, answer, answer_probabilities, build_lesson, question

SHORT = Recipe(hidden_size=32, intermediate_size=64, num_layers=1, max_steps=5)

MAKE = """
import sys
from pathlib import Path
from forebay.engines.tiny.model import ensure_model
from forebay.engines.tiny.recipe import Recipe
ensure_model(Path(sys.argv[1]), Recipe(hidden_size=32, intermediate_size=64, num_layers=1, max_steps=5))
"""


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_built_in_model_is_small_and_right_about_a_third_of_the_time(loaded: LoadedModel) -> None:
    assert 300_000 < loaded.network.num_parameters() < 600_000
    accuracy = float(answer_probabilities(loaded.network, build_lesson(loaded.tokenizer)).mean())
    assert 0.3 <= accuracy <= 0.6


def test_most_groups_of_eight_hold_right_and_wrong_answers(loaded: LoadedModel) -> None:
    right = answer_probabilities(loaded.network, build_lesson(loaded.tokenizer))
    assert float((1 - right**8 - (1 - right) ** 8).mean()) > 0.6


def test_a_cached_model_is_used_again_without_training(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_model, "warm_up", lambda *_: pytest.fail("trained again"))
    assert ensure_model(model_folder) == model_folder
    assert load_model(model_folder).context_length == 8192


def test_equal_recipes_give_equal_weights_and_another_seed_gives_others(tmp_path: Path) -> None:
    first = weights(ensure_model(tmp_path / "first", SHORT))
    assert weights(ensure_model(tmp_path / "second", SHORT)) == first
    assert weights(ensure_model(tmp_path / "other", replace(SHORT, seed=1))) != first


@pytest.mark.soak
def test_processes_that_make_the_same_model_at_once_both_end_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKE, str(tmp_path / "model")]
    racing = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(300) for process in racing] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert load_model(tmp_path / "model").context_length == SHORT.context_length


def test_a_model_published_in_the_meantime_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"

    def overtaken(draft: Path, _: Recipe) -> None:
        (draft / "config.json").write_text("ours")
        folder.mkdir()
        (folder / "config.json").write_text("theirs")

    monkeypatch.setattr(tiny_model, "_save_warmed_up", overtaken)
    assert (ensure_model(folder, SHORT) / "config.json").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_warm_up_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_model, "warm_up", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ensure_model(tmp_path / "model", SHORT)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_folder_follows_xdg_and_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder(Recipe()).parent == tmp_path / "forebay"
    assert default_folder(Recipe()) == default_folder(Recipe())
    assert default_folder(Recipe()) != default_folder(SHORT)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no config\.json") as told:
        load_model(tmp_path)
    assert told.value.field == "model_path"


def test_a_missing_package_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra) as told:
        require("torch")
    assert "forebay[local]" in told.value.hint


def test_the_thread_limit_holds_inside_the_block_only() -> None:
    torch = require("torch")
    before = torch.get_num_threads()
    with torch_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("text", ["plain words", "Zürich — 東京 🚀", "tabs\tand\r\nlines", "3 + 14 = 17"])
def test_every_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = build_tokenizer(Recipe())
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_are_tokens_of_their_own() -> None:
    tokenizer = build_tokenizer(Recipe())
    tokens = [tokenizer.decode([token]) for token in tokenizer.encode(question(3, 5) + answer(18))]
    assert [token for token in tokens if any(sign.isdigit() for sign in token)] == ["3", "5", "1", "8"]


def test_the_chat_template_takes_assistant_turns_and_open_ends() -> None:
    render = build_tokenizer(Recipe()).apply_chat_template
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    whole = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    assert render(chat, tokenize=False) == whole
    assert render(chat, tokenize=False, add_generation_prompt=True) == f"{whole}<|im_start|>assistant\n"
    assert render(chat, tokenize=False, continue_final_message=True) == whole.removesuffix("<|im_end|>\n")
