"""Loads the model folder: the user's own, or the built-in one, which is made on first use and cached."""

import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.engines.tiny.extra import require, torch_threads
from forebay.engines.tiny.recipe import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TURN_END,
    Recipe,
    answer,
    question,
    warm_up,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model in float32 on the CPU, with its tokenizer. Lengths are in tokens."""

    path: Path
    network: Any
    tokenizer: Any
    context_length: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]


def default_folder(recipe: Recipe) -> Path:
    """Cache folder of the recipe's model: below ``$XDG_CACHE_HOME``, otherwise ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "forebay" / f"tiny-{recipe.key()}"


def ensure_model(folder: Path | None = None, recipe: Recipe | None = None, *, threads: int = 1) -> Path:
    """Return the folder of a warmed-up model: the cached one, or one made now (about 10 s on one core).

    Safe for several processes at once: each may make its own, and the first to finish is kept.
    """
    recipe = recipe or Recipe()
    folder = folder or default_folder(recipe)
    if not (folder / "config.json").is_file():
        _make(folder, recipe, threads)
    return folder


def load_model(path: Path) -> LoadedModel:
    """Load a Hugging Face folder. Raises ``InvalidInput`` unless it has a causal model with a chat template."""
    if not _is_model_folder(path):
        raise InvalidInput(
            f"{path} is not a model folder: it has no config.json",
            field="model_path",
            hint="give the folder of a Hugging Face causal language model, or omit it to use the built-in model",
        )
    transformers, torch = require("transformers"), require("torch")
    require("jinja2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    # The first encoding may change the tokenizer's own settings, which is unsafe while another thread uses it.
    tokenizer.encode("")
    if not tokenizer.chat_template:
        raise InvalidInput(f"the tokenizer in {path} has no chat template", field="model_path")
    network = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False).to(torch.float32).eval()
    return LoadedModel(
        path=path,
        network=network,
        tokenizer=tokenizer,
        context_length=int(network.config.max_position_embeddings),
        vocabulary_size=int(network.config.vocab_size),
        eos_token_ids=_eos_token_ids(network, tokenizer),
    )


def _is_model_folder(path: Path) -> bool:
    try:
        return (path / "config.json").is_file()
    except OSError:  # a name that is too long
        return False


def take_weights(model: LoadedModel, path: Path) -> None:
    """Replace the model's weights with those in the folder ``path``.

    Raises ``InvalidInput``, changing nothing, unless the folder holds a model of the same shape.
    """
    if not _is_model_folder(path):
        raise InvalidInput(f"{path} is not a model folder: it has no config.json", field="model_path")
    kind = require("transformers").AutoModelForCausalLM
    try:
        network, info = kind.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # a truncated file or another format may raise anything
        raise InvalidInput(f"the weights in {path} cannot be read: {error}", field="model_path") from error
    # The reader fills missing weights with random values and only warns.
    if info["missing_keys"]:
        lacking = ", ".join(sorted(info["missing_keys"])[:3])
        raise InvalidInput(f"the weights in {path} are incomplete: {lacking} are missing", field="model_path")
    state = network.state_dict()
    if _shapes(state) != _shapes(model.network.state_dict()):
        raise InvalidInput(f"the weights in {path} belong to a model of another shape", field="model_path")
    model.network.load_state_dict(state)


def _shapes(state: Any) -> dict[str, Any]:
    return {name: tensor.shape for name, tensor in state.items()}


def _eos_token_ids(network: Any, tokenizer: Any) -> frozenset[int]:
    declared = network.generation_config.eos_token_id
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None)


def _make(folder: Path, recipe: Recipe, threads: int) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In the same parent folder, because a rename works only within one file system.
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with torch_threads(threads):
            _save_warmed_up(draft, recipe)
        _publish(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _publish(draft: Path, folder: Path) -> None:
    try:
        draft.rename(folder)
    except OSError:
        # A rename never replaces a non-empty folder: another process finished first, with an equivalent model.
        if not (folder / "config.json").is_file():
            raise


def _save_warmed_up(folder: Path, recipe: Recipe) -> None:
    torch = require("torch")
    tokenizer = build_tokenizer(recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        network = build_network(recipe, tokenizer)
        accuracy = warm_up(network, tokenizer, recipe)
    logger.info("the embedded model answers %.0f %% of the additions correctly", 100 * accuracy)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tokenizer(recipe: Recipe) -> Any:
    """Build a byte-level tokenizer: it encodes any text; words of the prompt are one token, digits stay separate."""
    tokenizers, transformers = require("tokenizers"), require("transformers")
    parts = tokenizers.pre_tokenizers
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = parts.Sequence([parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)])
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=recipe.max_vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(parts.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator([f"user\n{question(3, 5)}", f"assistant\n{answer(8)}", "system\n", "tool\n"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=TURN_END, pad_token=END_OF_TEXT, model_max_length=recipe.context_length
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_network(recipe: Recipe, tokenizer: Any) -> Any:
    """Build a Qwen2-shaped network with random weights, in float32."""
    transformers, torch = require("transformers"), require("torch")
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        max_position_embeddings=recipe.context_length,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.Qwen2ForCausalLM(config).to(torch.float32)
