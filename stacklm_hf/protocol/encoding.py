"""Text to ids, with the border between trusted and untrusted text drawn once.

Contract: :func:`encode_trusted` turns control markers into control ids; it is for text that the harness itself
wrote. :func:`encode_untrusted` gives the exact text and can never give a control id, nor any other special id
of the tokenizer; it is for questions, passages, observations and whatever else came from outside. Neither adds
a token of its own, truncates or pads.

Both work on any tokenizer of transformers that has a `tokenizers` backend, and both may be called from several
threads. How a backend treats special tokens in a text, its truncation and its padding are state of the backend,
which every `tokenizer(...)` call may change. So nothing is ever switched on the caller's tokenizer: each
tokenizer gets two private copies of its backend, one for each kind of text, made on the first call.
"""

from __future__ import annotations

import copy
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer, pre_tokenizers

from stacklm_hf.protocol.tokens import SPECIAL_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_trusted(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of text that the harness wrote: control markers become control ids.

    Args:
        tokenizer: Any fast tokenizer that holds the nine control tokens.
        text: The text; a lone surrogate, which no tokenizer takes, counts as U+FFFD.

    Returns:
        The ids, with nothing added in front or behind.

    Raises:
        TypeError: The tokenizer has no `tokenizers` backend.
    """
    return _encode(_encoders(tokenizer).trusted, text)


def encode_untrusted(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of text from outside: it is spelled out exactly, and no special id can come of it.

    Args:
        tokenizer: Any fast tokenizer.
        text: The text; a lone surrogate, which no tokenizer takes, counts as U+FFFD.

    Returns:
        The ids, with nothing added in front or behind.

    Raises:
        TypeError: The tokenizer has no `tokenizers` backend.
    """
    encoders = _encoders(tokenizer)
    ids = _encode(encoders.untrusted, text)
    if encoders.special_ids.isdisjoint(ids):
        return ids
    # Not byte-level: models such as Unigram may hold `</s>` as an ordinary piece of the vocabulary that plain
    # text reaches. Markers are then encoded in two halves, and whatever is left of them is dropped.
    halves = (half for piece in encoders.marker.split(text) for half in (piece[:1], piece[1:]) if half)
    ids = [token_id for half in halves for token_id in _encode(encoders.untrusted, half)]
    return [token_id for token_id in ids if token_id not in encoders.special_ids]


@dataclass(frozen=True)
class _Encoders:
    """Private copies of a tokenizer's backend, and what it was when they were made."""

    source: Tokenizer
    size: tuple[int, int]
    trusted: Tokenizer
    untrusted: Tokenizer
    special_ids: frozenset[int]
    marker: re.Pattern[str]


_cache: WeakKeyDictionary[PreTrainedTokenizerBase, _Encoders] = WeakKeyDictionary()
_lock = threading.Lock()


def _encoders(tokenizer: PreTrainedTokenizerBase) -> _Encoders:
    """The copies for this tokenizer, made again when tokens were added to it since."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TypeError(f"{type(tokenizer).__name__} has no `tokenizers` backend: load it with AutoTokenizer")
    size = _size(backend)
    encoders = _cache.get(tokenizer)
    if encoders is None or encoders.source is not backend or encoders.size != size:
        with _lock:
            encoders = _cache[tokenizer] = _make_encoders(tokenizer, backend)
    return encoders


def _size(backend: Tokenizer) -> tuple[int, int]:
    """Changes whenever a token is added, be it new or one of the vocabulary that became special."""
    return backend.get_vocab_size(with_added_tokens=True), len(backend.get_added_tokens_decoder())


def _make_encoders(tokenizer: PreTrainedTokenizerBase, backend: Tokenizer) -> _Encoders:
    trusted, untrusted = copy.deepcopy(backend), copy.deepcopy(backend)
    for clone in (trusted, untrusted):
        clone.no_truncation()
        clone.no_padding()
        _never_begin_a_text(clone)
    trusted.encode_special_tokens = False
    untrusted.encode_special_tokens = True
    specials = {token.content: index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    specials |= {token: index for token in SPECIAL_TOKENS if (index := backend.token_to_id(token)) is not None}
    # The unknown token is how a tokenizer without byte fallback spells what it does not know.
    specials.pop(str(tokenizer.unk_token), None)
    longest_first = sorted(specials, key=len, reverse=True)
    return _Encoders(
        source=backend,
        size=_size(backend),
        trusted=trusted,
        untrusted=untrusted,
        special_ids=frozenset(specials.values()),
        marker=re.compile(f"({'|'.join(map(re.escape, longest_first))})" if specials else "(?!)"),
    )


def _never_begin_a_text(backend: Tokenizer) -> None:
    """Spans are encoded one by one, yet stand in the middle of an episode.

    Tokenizers such as Llama 2's put a blank in front of the first word of a text, and only there.
    """
    pre_tokenizer = backend.pre_tokenizer
    steps: Any = pre_tokenizer if isinstance(pre_tokenizer, pre_tokenizers.Sequence) else [pre_tokenizer]
    for step in steps:
        if isinstance(step, pre_tokenizers.Metaspace) and step.prepend_scheme == "first":
            step.prepend_scheme = "never"


def _encode(backend: Tokenizer, text: str) -> list[int]:
    try:
        return backend.encode(text, add_special_tokens=False).ids
    except (UnicodeEncodeError, TypeError):
        if not isinstance(text, str):
            raise
        # JSON from outside may carry half of a surrogate pair: `json.loads` lets it through, UTF-8 does not.
        clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return backend.encode(clean, add_special_tokens=False).ids
