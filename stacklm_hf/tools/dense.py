"""Retrieval by sentence embeddings: sentence-transformers for the vectors, FAISS for the search.

Contract: the score is the inner product of L2-normalised embeddings, that is, their cosine, and the search is exact.
Both libraries come with the extra `dense` and are imported when a retriever is built.
`stacklm_hf.tools.retrieval` has the rest of the contract.
"""

from __future__ import annotations

import os
import threading
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

from stacklm_hf.tools.retrieval import Passage, stream_safe, top_indices

DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
_INSTALL = 'DenseRetriever needs sentence-transformers and faiss: pip install "stacklm-hf[dense]"'


class DenseRetriever:
    """Ranks passages by the cosine of sentence embeddings.

    Args:
        passages: The corpus, in the order that breaks ties.
        encoder: Name or folder of a sentence-transformers model, or an object with `encode(list of str)` that gives
            an array of shape `(n, dimension)`. An object with `encode_query` and `encode_document` is taken for a
            SentenceTransformer, and these are used, so that an asymmetric encoder gets its prompts.
        show_progress: Shows a bar while a SentenceTransformer embeds the corpus.

    Raises:
        ImportError: The extra `dense` is not installed.
        OSError: The encoder is neither a folder nor a model that can be had.
        ValueError: The encoder gives no finite vector per text.
    """

    def __init__(
        self, passages: Sequence[Passage], encoder: Any = DEFAULT_ENCODER, *, show_progress: bool = False
    ) -> None:
        try:
            import faiss
        except ImportError as error:
            raise ImportError(_INSTALL) from error
        self.passages = tuple(passages)
        self._encoder = _load_encoder(os.fspath(encoder)) if isinstance(encoder, str | os.PathLike) else encoder
        self._lock = threading.Lock()
        # Equal texts are embedded once: in two batches they would get slightly different vectors, and then the
        # order of the corpus would not decide among them.
        places: dict[str, list[int]] = {}
        for place, passage in enumerate(self.passages):
            if passage.text.strip():
                places.setdefault(passage.text, []).append(place)
        self._places = list(places.values())
        self._index = None
        if places:
            vectors = self._embed(list(places), "encode_document", show_progress)
            self._index = faiss.IndexFlatIP(vectors.shape[1])
            self._index.add(vectors)

    def search(self, query: str, k: int) -> list[tuple[Passage, float]]:
        """The `k` best passages for `query`, best first, all with a score above zero."""
        if k <= 0 or self._index is None or not query.strip():
            return []
        vector = self._embed([query], "encode_query", False)
        # k distinct texts are enough for k passages; one more would not change the k best.
        values, rows = self._index.search(vector, min(k, self._index.ntotal))
        scores = np.zeros(len(self.passages))
        for value, row in zip(values[0], rows[0], strict=True):
            scores[self._places[row]] = value
        return [(self.passages[i], float(scores[i])) for i in top_indices(scores, k)]

    def _embed(self, texts: list[str], method: str, show_progress: bool) -> np.ndarray:
        """Normalised float32 embeddings of shape `(len(texts), dimension)`; a zero vector stays zero."""
        special = getattr(self._encoder, method, None)
        encode, options = (special, {"show_progress_bar": show_progress}) if special else (self._encoder.encode, {})
        texts = [_clean(text) for text in texts]
        with self._lock:  # A Hugging Face tokenizer cannot be used by two threads at once ("Already borrowed").
            vectors = np.asarray(encode(texts, **options), dtype=np.float32)
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise ValueError(f"the encoder must give one finite vector per text, got shape {vectors.shape}")
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(norms > 0, norms, 1)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


def _clean(text: str) -> str:
    """NFC, as encoders see text in training; lone surrogates, which would stop a tokenizer, become `?`."""
    return unicodedata.normalize("NFC", stream_safe(text)).encode("utf-8", "replace").decode()


def _load_encoder(name: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(_INSTALL) from error
    try:
        return SentenceTransformer(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise OSError(
            f"cannot load the encoder {name!r}: give a local folder or a model on the Hub ({reason})"
        ) from error
