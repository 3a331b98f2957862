"""What every retriever shares: the passage, the interface, the words of a text and the ranking.

Contract: a retriever is built once from a sequence of passages and is read-only afterwards, so one object serves
many threads. `search(query, k)` returns at most `k` pairs of passage and score, best first; equal scores keep the
order of the corpus; a hit whose score is not above zero is dropped. `k <= 0`, a query without words and an empty
corpus give no hits; a `k` above the corpus size gives all hits that there are.
"""

from __future__ import annotations

import itertools
import unicodedata
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import regex


@dataclass(frozen=True)
class Passage:
    """A piece of a document that a search can return.

    Args:
        doc_id: Identifier of the passage, e.g. `doc-0014-0` for the first chunk of document 14.
        text: What the model reads; untrusted.
    """

    doc_id: str
    text: str


class Retriever(Protocol):
    """Anything that ranks passages for a query, as the module's contract says."""

    def search(self, query: str, k: int) -> list[tuple[Passage, float]]:
        """The `k` best passages for `query` with their scores, best first."""
        ...


# A word is a run of letters, digits and the marks that belong to them (vowel signs of Indic scripts, niqqud, tone
# marks), so on ASCII it is [A-Za-z0-9]+.
_ASCII_WORD = regex.compile(r"[a-z0-9]+")
_WORD = regex.compile(r"[\p{L}\p{N}\p{M}]+")
# Scripts written without spaces, and Hangul, whose particles stick to the noun.
_UNSPACED = (
    r"\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Bopomofo}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
    # The sound marks that Hiragana and Katakana share (they belong to no single script).
    r"\u3099\u309a\u30fc"
)
_RUN = regex.compile(rf"[{_UNSPACED}]+|[^{_UNSPACED}]+")
_UNSPACED_START = regex.compile(rf"[{_UNSPACED}]")
_CHARACTER = regex.compile(r"\X")
_IGNORABLE = regex.compile(r"\p{Default_Ignorable_Code_Point}+")
_LONG_MARKS = regex.compile(r"(\p{M}{30})\p{M}+")


def stream_safe(text: str) -> str:
    """Cuts each run of combining marks to the 30 of the Stream-Safe Text Format (UAX #15), more than any language uses.

    `unicodedata.normalize` takes quadratic time on longer runs.
    """
    return text if text.isascii() else _LONG_MARKS.sub(r"\1", text)


def fold(text: str) -> str:
    """The form in which texts are compared: NFKC_Casefold of the Unicode Standard, section 3.13.

    Upper and lower case, the two normal forms of an accented letter, full-width and ordinary digits, and text with
    or without soft hyphens and zero-width joiners become equal. Accents stay: `resume` and `résumé` differ.
    """
    if text.isascii():
        return text.lower()
    text = stream_safe(_IGNORABLE.sub("", text))
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFD", text).casefold())
    # A second time, because folding the case of a compatibility character can open a new one. NFKC can also expand
    # one character into several marks, but not into a run long enough to matter.
    return _IGNORABLE.sub("", unicodedata.normalize("NFKC", text.casefold()))


def words(text: str) -> list[str]:
    """Splits a text into the terms that retrieval counts, in order and with repeats.

    A term is a folded run of letters, digits and their marks; everything else separates. Text in a script that has
    no spaces between words (Han, Kana, Thai, Lao, Khmer, Myanmar) or glues particles to them (Hangul) gives each
    character and each pair of neighbours, the usual index for such text without a dictionary.

    >>> words("The RoPE-base of Stack-100M")
    ['the', 'rope', 'base', 'of', 'stack', '100m']
    >>> words("東京都")
    ['東', '京', '都', '東京', '京都']
    """
    folded = fold(text)
    if folded.isascii():
        return _ASCII_WORD.findall(folded)
    terms: list[str] = []
    for word in _WORD.findall(folded):
        if word.isascii():
            terms.append(word)
            continue
        for run in _RUN.findall(word):
            if not _UNSPACED_START.match(run):
                terms.append(run)
                continue
            characters = _CHARACTER.findall(run)
            terms.extend(characters)
            terms.extend(first + second for first, second in itertools.pairwise(characters))
    return terms


def top_indices(scores: np.ndarray, k: int) -> np.ndarray:
    """Positions of the `k` highest scores above zero, best first; equal scores keep their order.

    Args:
        scores: One score per passage, shape `(n,)`. NaN counts as no hit.
        k: How many at most; zero or less gives none.

    Returns:
        Integer array of shape `(m,)`, `m <= k`.
    """
    hits = np.flatnonzero(scores > 0)
    if k <= 0 or hits.size == 0:
        return hits[:0]
    values = scores[hits]
    if hits.size > k:
        # Everything that ties with the k-th best stays in, so that the stable sort decides among them.
        kept = values >= np.partition(values, hits.size - k)[hits.size - k]
        hits, values = hits[kept], values[kept]
    return hits[np.argsort(-values, kind="stable")[:k]]
