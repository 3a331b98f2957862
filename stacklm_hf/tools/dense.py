"""Retrieval by sentence embeddings: sentence-transformers for the vectors, FAISS for the search.

Contract: the score is the inner product of L2-normalised embeddings, that is, their cosine, and the search is exact.
Both libraries come with the extra `dense` and are imported when a retriever is built.
`stacklm_hf.tools.retrieval` has the rest of the contract.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from stacklm_hf.tools.retrieval import Passage, top_indices

DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
_INSTALL = 'DenseRetriever needs sentence-transformers and faiss: pip install "stacklm-hf[dense]"'


class DenseRetriever:
    """Ranks passages by the cosine of sentence embeddings.

    Args:
        passages: The corpus, in the order that breaks ties.
        encoder: Name or folder of a sentence-transformers model, or an object with `encode(list of str)` that gives
            an array of shape `(n, dimension)`. Where the object has `encode_query` and `encode_document`, they are
            used, so that an asymmetric encoder gets its prompts.
        show_progress: Shows a bar while a sentence-transformers encoder embeds the corpus.

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
        self._encoder = _load_encoder(encoder) if isinstance(encoder, str) else encoder
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
        encode = getattr(self._encoder, method, self._encoder.encode)
        # Lone surrogates, which JSON can carry, have no UTF-8 form and would stop the tokenizer.
        texts = [text.encode("utf-8", "replace").decode() for text in texts]
        options = {"show_progress_bar": True} if show_progress else {}
        with self._lock:  # A Hugging Face tokenizer cannot be used by two threads at once ("Already borrowed").
            vectors = np.ascontiguousarray(encode(texts, **options), dtype=np.float32)
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise ValueError(f"the encoder must give one finite vector per text, got shape {vectors.shape}")
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(norms > 0, norms, 1)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


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
