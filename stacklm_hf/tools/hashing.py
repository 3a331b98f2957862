"""Retrieval by hashed character n-grams: no vocabulary, no training, robust to inflection and typing errors.

Contract: a text becomes a vector over 2**64 hashed features: its words, and the n-grams of three to five
characters inside each word with its ends marked. A feature that occurs f times weighs 1 + ln f. The score is the
cosine of query and passage, between 0 and 1, and above 0 exactly where they share a feature. The hash is BLAKE2b, so
vectors are the same in every process and on every machine. `stacklm_hf.tools.retrieval` has the rest of the contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from stacklm_hf.tools.retrieval import Passage, top_indices, words

_SIZES = (3, 4, 5)


class HashingRetriever:
    """Ranks passages by the cosine of hashed character n-grams.

    The vectors are stored as an inverted index: for each feature of the corpus the passages that have it.

    Args:
        passages: The corpus, in the order that breaks ties.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = tuple(passages)
        cache: dict[str, np.ndarray] = {}  # Words repeat: hashing each once makes building some 20 times faster.
        vectors = [_vector(words(passage.text), cache) for passage in self.passages]
        sizes = [len(features) for features, _ in vectors]
        features = np.concatenate([features for features, _ in vectors] or [np.empty(0, np.uint64)])
        weights = np.concatenate([weights for _, weights in vectors] or [np.empty(0, np.float32)])
        owners = np.repeat(np.arange(len(vectors), dtype=np.int32), sizes)
        order = np.argsort(features, kind="stable")
        self._features, starts = np.unique(features[order], return_index=True)
        self._bounds = np.append(starts, features.size)
        self._owners = owners[order]
        self._weights = weights[order]

    def search(self, query: str, k: int) -> list[tuple[Passage, float]]:
        """The `k` best passages for `query`, best first, all with a score above zero."""
        if k <= 0:
            return []
        scores = self.scores(query)
        return [(self.passages[i], float(scores[i])) for i in top_indices(scores, k)]

    def scores(self, query: str) -> np.ndarray:
        """The cosine of `query` with every passage: float64, shape `(len(passages),)`, in corpus order."""
        scores = np.zeros(len(self.passages))
        features, weights = _vector(words(query), {})
        places = np.searchsorted(self._features, features)
        for feature, weight, place in zip(features, weights, places, strict=True):
            if place < self._features.size and self._features[place] == feature:
                posting = slice(self._bounds[place], self._bounds[place + 1])
                scores[self._owners[posting]] += weight * self._weights[posting]  # A passage is in a posting once.
        return scores


def _vector(terms: Iterable[str], cache: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The features of a text, sorted and distinct (uint64), and their weights (float32) of Euclidean norm 1."""
    hashed = []
    for term in terms:
        if term not in cache:
            cache[term] = _hash_word(term)
        hashed.append(cache[term])
    if not hashed:
        return np.empty(0, np.uint64), np.empty(0, np.float32)
    features, counts = np.unique(np.concatenate(hashed), return_counts=True)
    weights = 1 + np.log(counts)
    return features, (weights / np.linalg.norm(weights)).astype(np.float32)


def _hash_word(word: str) -> np.ndarray:
    """Hashes of a word and of its n-grams; `<` and `>` mark its ends, so a prefix differs from the same middle."""
    marked = f"<{word}>"
    grams = [marked]
    for size in _SIZES:
        if size < len(marked):  # A gram of the whole length would be the word again.
            grams.extend(marked[i : i + size] for i in range(len(marked) - size + 1))
    digests = b"".join(blake2b(gram.encode("utf-8", "surrogatepass"), digest_size=8).digest() for gram in grams)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)
