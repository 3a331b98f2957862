"""Okapi BM25 on top of bm25s, with words of any script and a stable order of ties.

Contract: the score of a passage d for a query q is

    sum over the terms t of q, repeats included, of
        ln(1 + (N - n(t) + 0.5) / (n(t) + 0.5)) * f(t, d) * (k1 + 1) / (f(t, d) + k1 * (1 - b + b * |d| / avgdl))

with N passages, n(t) of them containing t, f(t, d) occurrences of t in d and |d| the number of terms in d. The idf
is Lucene's, which is never negative (Kamphuis et al., "Which BM25 Do You Mean?", ECIR 2020, table 1); the term
frequency is Robertson's with its constant factor k1 + 1.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from stacklm_hf.tools.retrieval import Passage, top_indices, words


class BM25Retriever:
    """Ranks passages by BM25; the contract of `search` is that of `stacklm_hf.tools.retrieval`.

    Args:
        passages: The corpus, in the order that breaks ties.
        k1: Saturation of the term frequency, zero or more.
        b: Strength of the length normalisation, from 0 to 1.

    Raises:
        ValueError: `k1` or `b` is out of range.
    """

    def __init__(self, passages: Sequence[Passage], *, k1: float = 1.5, b: float = 0.75) -> None:
        if not (0 <= k1 < float("inf") and 0 <= b <= 1):
            raise ValueError(f"BM25 needs k1 >= 0 and 0 <= b <= 1, got k1={k1} and b={b}")
        self.passages = tuple(passages)
        self._vocabulary: dict[str, int] = {}
        corpus_ids = [
            [self._vocabulary.setdefault(term, len(self._vocabulary)) for term in words(passage.text)]
            for passage in self.passages
        ]
        # Without a single term there is no average length to divide by, and nothing to find.
        self._index = _build_index(corpus_ids, self._vocabulary, k1, b) if self._vocabulary else None

    def search(self, query: str, k: int) -> list[tuple[Passage, float]]:
        """The `k` best passages for `query`, best first, all with a score above zero."""
        if k <= 0:
            return []
        scores = self.scores(query)
        return [(self.passages[i], float(scores[i])) for i in top_indices(scores, k)]

    def scores(self, query: str) -> np.ndarray:
        """The score of every passage for `query`: float64, shape `(len(passages),)`, in corpus order."""
        counts = Counter(self._vocabulary[term] for term in words(query) if term in self._vocabulary)
        total = np.zeros(len(self.passages))
        if self._index is None:
            return total
        # Terms that occur equally often are scored together: a query that says one word a million times then costs
        # no more than one that says it once.
        by_count: defaultdict[int, list[int]] = defaultdict(list)
        for term_id, count in counts.items():
            by_count[count].append(term_id)
        for count, term_ids in by_count.items():
            total += count * self._index.get_scores_from_ids(term_ids)
        return total


def _build_index(corpus_ids: list[list[int]], vocabulary: dict[str, int], k1: float, b: float) -> Any:
    import bm25s  # Imports scipy where it is installed: half a second that other retrievers need not pay.

    # bm25s sets its logger to DEBUG on import, which would show through any application's own logging setup.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    index = bm25s.BM25(k1=k1, b=b, method="atire", idf_method="lucene", dtype="float64", backend="numpy")
    index.index((corpus_ids, vocabulary), create_empty_token=False, show_progress=False)
    return index
