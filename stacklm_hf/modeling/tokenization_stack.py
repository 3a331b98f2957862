"""The tokenizer of Stack models: byte-level BPE, in the native layout, on the `tokenizers` backend.

Contract: ids 0 to 255 are the raw bytes, then one id per merge in merge order, then padding tokens
`<|unused_n|>` where the merges fall short of the vocabulary, then the nine control tokens of
`stacklm_hf.protocol.tokens` as the last nine ids. Nothing is normalised, no token is added around a text, and
decoding gives back every text exactly, control markers included.

End of text for generation is `<|end|>`, the end of a turn: `eos_token` is what `generate`, TRL's trainers and
vLLM stop at and what TRL takes for "this completion finished", so it has to be the token that the model really
closes its turns with. `<|eos|>`, the end of a document in pre-training, stays a control token of its own, and
padding is `<|pad|>`, so that masking the padding never masks an end of turn. See :func:`generation_defaults`.

Everything that this tokenizer does is data in `tokenizer.json` and `tokenizer_config.json`. A saved folder
therefore loads with the same ids in a process without this package (transformers falls back to its own
backend class): no remote code is needed, so none is shipped. `AutoTokenizer` looks at the config of a model beside it
all the same, and asks the user about that one's code unless told `trust_remote_code=True`; either answer will do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from stacklm_hf.protocol.template import CHAT_TEMPLATE, RESPONSE_TEMPLATE
from stacklm_hf.protocol.tokens import BOS, END, PAD, SPECIAL_TOKENS

NATIVE_FORMAT = "stacklm-bpe-v1"

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_PATTERN = _PATTERN.replace("{DIGITS}", "{1,3}")
"""The native split pattern: contractions, words, digit runs of at most three, punctuation, blanks."""
SINGLE_DIGITS_PATTERN = _PATTERN.replace("{DIGITS}", "")
"""The same with every digit on its own, which makes arithmetic and copying numbers easier for tiny models."""

_NUM_BYTES = 256
_BYTE_TOKENS: tuple[str, ...] = tuple(bytes_to_unicode()[byte] for byte in range(_NUM_BYTES))
_NATIVE_KEYS = {"format": str, "vocab_size": int, "pattern": str, "merges": list, "special_tokens": list}


class StackTokenizerFast(PreTrainedTokenizerFast):
    """Byte-level BPE with the nine control tokens as the last nine ids.

    It has no `__init__` of its own on purpose: transformers then loads it from `tokenizer.json` as it stands,
    which keeps ids identical however often it is saved and reloaded. Build one with :meth:`from_native` or
    :func:`train_stack_tokenizer`, or load one with `from_pretrained` or `AutoTokenizer`.
    """

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 (transformers' own convention)
    padding_side = "left"  # decoder-only: a batch is continued at its right end

    @classmethod
    def from_native(
        cls, tokenizer_json: str | PathLike[str] | dict[str, Any], *, model_max_length: int | None = None
    ) -> StackTokenizerFast:
        """Builds the tokenizer from a native file of the format `stacklm-bpe-v1`.

        Args:
            tokenizer_json: Path of the file, or its content as a dict with the keys `format`, `vocab_size`,
                `pattern`, `merges` (pairs of ids) and `special_tokens` (padding tokens, then the nine).
            model_max_length: Context length in tokens to record, None for no limit.

        Returns:
            A tokenizer with the same ids as the native one, chat template and response template set.

        Raises:
            ValueError: The file is unreadable or malformed; one line says where and why.
        """
        source = "native tokenizer" if isinstance(tokenizer_json, dict) else str(tokenizer_json)
        try:
            native = tokenizer_json if isinstance(tokenizer_json, dict) else _read_json(Path(tokenizer_json))
            backend = _build_backend(_check_native(native))
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
        return cls(tokenizer_object=backend, **_init_kwargs(model_max_length))


def train_stack_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    pattern: str | None = None,
    single_digits: bool = False,
    model_max_length: int | None = None,
    show_progress: bool = False,
) -> StackTokenizerFast:
    """Trains a tokenizer of the native layout on a stream of texts.

    Args:
        texts: The texts, read once and never held in memory together.
        vocab_size: Ids in all, at least 265 (256 bytes and nine control tokens). Where the texts give fewer
            merges, padding tokens `<|unused_n|>` fill the vocabulary up to exactly this size.
        pattern: Regular expression (Oniguruma syntax) of the pieces that merges never cross; the native one
            by default.
        single_digits: Split every digit on its own; only with the default pattern.
        model_max_length: Context length in tokens to record, None for no limit.
        show_progress: Show the trainer's progress bars.

    Raises:
        ValueError: The size is too small, the pattern does not compile, or both `pattern` and
            `single_digits` are given.
    """
    smallest = _NUM_BYTES + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size {vocab_size} is too small: at least {smallest} (bytes and control tokens)")
    if pattern is not None and single_digits:
        raise ValueError("give either a pattern or single_digits: a pattern says itself how digits are split")
    if isinstance(texts, str):
        raise ValueError("texts must be an iterable of texts, not one text")
    if pattern is None:
        pattern = SINGLE_DIGITS_PATTERN if single_digits else SPLIT_PATTERN

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(pattern)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    merges = _native_merges(tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"])
    unused = vocab_size - smallest - len(merges)
    native = {
        "format": NATIVE_FORMAT,
        "vocab_size": vocab_size,
        "pattern": pattern,
        "merges": merges,
        "special_tokens": [*_unused_tokens(unused), *SPECIAL_TOKENS],
    }
    return StackTokenizerFast.from_native(native, model_max_length=model_max_length)


def generation_defaults(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The ids that tokenizer, config and generation config have to agree on.

    Args:
        tokenizer: A tokenizer that holds the nine control tokens.

    Returns:
        `bos_token_id`, `eos_token_id` (the end of a turn) and `pad_token_id`, ready for
        `StackConfig(**...)`, `GenerationConfig(**...)` or `config.update(...)`.

    Raises:
        ValueError: The tokenizer lacks a control token.
    """
    vocab = tokenizer.get_vocab()
    missing = [token for token in SPECIAL_TOKENS if token not in vocab]
    if missing:
        raise ValueError(f"the tokenizer lacks {' '.join(missing)}: add them with add_agent_tokens(model, tokenizer)")
    return {"bos_token_id": vocab[BOS], "eos_token_id": vocab[END], "pad_token_id": vocab[PAD]}


def _init_kwargs(model_max_length: int | None) -> dict[str, Any]:
    """What the transformers side of the tokenizer has to know; all of it is saved and reloaded."""
    kwargs: dict[str, Any] = {
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "extra_special_tokens": [token for token in SPECIAL_TOKENS if token not in (BOS, END, PAD)],
        "padding_side": "left",  # spelled out, so that the backend class of a process without us has it too
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "response_template": RESPONSE_TEMPLATE,
    }
    if model_max_length is not None:
        kwargs["model_max_length"] = model_max_length
    return kwargs


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # bad JSON or bad UTF-8
        raise ValueError(f"is not a JSON file ({error})") from None


def _check_native(native: Any) -> dict[str, Any]:
    """Checks a native file's content whole, so that nothing half-right is built from it."""
    if not isinstance(native, dict):
        raise ValueError("must hold a JSON object")
    for key, kind in _NATIVE_KEYS.items():
        if key not in native:
            raise ValueError(f"lacks the key {key!r}")
        if not isinstance(native[key], kind) or isinstance(native[key], bool):
            raise ValueError(f"{key!r} must be of type {kind.__name__}, is {type(native[key]).__name__}")
    if native["format"] != NATIVE_FORMAT:
        raise ValueError(f"format is {native['format']!r}, expected {NATIVE_FORMAT!r}")
    merges, specials = native["merges"], native["special_tokens"]
    for rank, merge in enumerate(merges):
        if not (isinstance(merge, list | tuple) and len(merge) == 2 and all(type(part) is int for part in merge)):
            raise ValueError(f"merge {rank} must be a pair of ids, is {merge!r}")
        if not all(0 <= part < _NUM_BYTES + rank for part in merge):
            raise ValueError(f"merge {rank} uses an id that does not exist yet: {merge!r}")
    if tuple(specials[-len(SPECIAL_TOKENS) :]) != SPECIAL_TOKENS:
        raise ValueError(f"special_tokens must end with {' '.join(SPECIAL_TOKENS)}, in this order")
    padding = specials[: -len(SPECIAL_TOKENS)]
    if padding != _unused_tokens(len(padding)):
        raise ValueError("special_tokens may hold only <|unused_0|>, <|unused_1|>, ... before the nine control tokens")
    total = _NUM_BYTES + len(merges) + len(specials)
    if total != native["vocab_size"]:
        raise ValueError(f"vocab_size is {native['vocab_size']}, but bytes, merges and special tokens make {total}")
    return native


def _build_backend(native: dict[str, Any]) -> Tokenizer:
    """The `tokenizers` object of a checked native file."""
    names = list(_BYTE_TOKENS)
    vocab = {name: index for index, name in enumerate(names)}
    merges: list[tuple[str, str]] = []
    for rank, (left, right) in enumerate(native["merges"]):
        name = names[left] + names[right]
        if name in vocab:  # the backend tells tokens apart by their text, so ids could not all be kept
            raise ValueError(f"merge {rank} makes the same text as id {vocab[name]}: the ids would be ambiguous")
        vocab[name] = len(names)
        names.append(name)
        merges.append((names[left], names[right]))
    # Padding tokens are plain entries that no merge reaches: no text, trusted or not, can ever produce one.
    for name in native["special_tokens"]:
        vocab[name] = len(vocab)

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(native["pattern"])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    try:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    except Exception as error:  # the binding raises a bare Exception for a pattern that does not compile
        raise ValueError(f"the split pattern does not compile ({error})") from None
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _native_merges(merges: Iterator[tuple[str, str]] | Iterable[tuple[str, ...]]) -> list[list[int]]:
    """Merges by text, in training order, as pairs of native ids."""
    ids = {name: index for index, name in enumerate(_BYTE_TOKENS)}
    native: list[list[int]] = []
    for left, right in merges:
        if left + right in ids:
            continue  # a second way to a token that exists already: the layout has one merge per token
        ids[left + right] = len(ids)
        native.append([ids[left], ids[right]])
    return native


def _unused_tokens(count: int) -> list[str]:
    return [f"<|unused_{index}|>" for index in range(count)]
