"""The tokenizer and chat template of a model folder."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.core.errors import InvalidInput
from forebay.engines.chat_template import check_template, load_template
from forebay.engines.scripted.tokens import TURN_END, encode, encode_chat
from tests.engines.template_kit import write_tokenizer

MESSAGES = [{"role": "user", "content": "é?"}, {"role": "assistant", "content": None}, {"role": "user", "content": "x"}]


def test_prompts_are_those_of_the_engine_and_texts_too(tmp_path: Path) -> None:
    template = load_template(write_tokenizer(tmp_path))
    assert template.render(MESSAGES) == encode_chat(MESSAGES)
    assert template.text_of([*encode("né"), TURN_END], False) == "né"
    assert template.text_of([*encode("né"), TURN_END], True) == "né<|im_end|>"


def test_messages_that_the_template_refuses_are_bad_input(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{%- for", "{{ raise_exception('no systems') }}{%- for"))
    with pytest.raises(InvalidInput, match="no systems"):
        load_template(folder).render(MESSAGES)


def _no_folder(folder: Path) -> Path:
    return folder / "missing"


def _no_tokenizer(folder: Path) -> Path:
    (write_tokenizer(folder) / "tokenizer.json").unlink()
    return folder


def _no_template(folder: Path) -> Path:
    return write_tokenizer(folder, has_template=False)


def _torn(folder: Path) -> Path:
    (write_tokenizer(folder) / "tokenizer_config.json").write_text("{")
    return folder


def _long_name(folder: Path) -> Path:
    return folder / ("x" * 5000)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_no_folder, "is not a folder"),
        (_long_name, "is not a folder"),
        (_no_tokenizer, "no tokenizer"),
        (_no_template, "no chat template"),
        (_torn, "cannot be read"),
    ],
)
def test_a_folder_that_will_not_do_is_refused_by_its_files(
    tmp_path: Path, make: Callable[[Path], Path], told: str
) -> None:
    folder = make(tmp_path)
    for use in (check_template, load_template):
        with pytest.raises(InvalidInput, match=told) as caught:
            use(folder)
        assert caught.value.field == "template_path"
        assert caught.value.hint


def test_a_template_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, has_template=False)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    check_template(folder)
    assert load_template(folder).render([{"role": "user", "content": "hi"}]) == encode("hi")


def test_without_transformers_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    hidden = lambda name: None if name == "transformers" else found(name)  # noqa: E731 - short
    monkeypatch.setattr("forebay.engines.chat_template.find_spec", hidden)
    with pytest.raises(InvalidInput, match="transformers") as caught:
        check_template(write_tokenizer(tmp_path))
    assert "forebay[local]" in str(caught.value.hint)
