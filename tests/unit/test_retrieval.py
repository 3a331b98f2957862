"""Retrieval: what all retrievers do alike, the words of a text, and the scores of BM25 and of hashing."""

import json
import logging
import math
import os
import pickle
import re
import subprocess
import sys
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stacklm_hf.tools import BM25Retriever, HashingRetriever, Passage
from stacklm_hf.tools.retrieval import fold, top_indices, words

DATA = Path(__file__).parents[1] / "data"
FACTS = [
    Passage(doc_id, f"the {attribute} of {entity} is {value}.")
    for doc_id, entity, attribute, value in json.loads((DATA / "facts_seed0.json").read_text())
]
EXPECTED = json.loads((DATA / "bm25_expected.json").read_text())
RETRIEVERS = [BM25Retriever, HashingRetriever]


def corpus(*texts):
    return [Passage(f"d{place}", text) for place, text in enumerate(texts)]


def ids(hits):
    return [passage.doc_id for passage, _ in hits]


# --- the original's scores ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bm25():
    return BM25Retriever(FACTS, k1=EXPECTED["k1"], b=EXPECTED["b"])


@pytest.mark.parametrize("case", EXPECTED["cases"], ids=lambda case: case["query"])
def test_bm25_gives_the_recorded_scores_in_the_recorded_order(bm25, case):
    hits = bm25.search(case["query"], 5)
    assert ids(hits) == [doc_id for doc_id, _ in case["top5"]]
    assert [score for _, score in hits] == pytest.approx([score for _, score in case["top5"]], abs=1e-6)


def test_the_recorded_parameters_are_the_defaults(bm25):
    assert BM25Retriever(FACTS).search("hidden size", 268) == bm25.search("hidden size", 268)


def _plain_bm25(texts, query, k1, b):
    """The formula of the docstring, term by term."""
    docs = [words(text) for text in texts]
    average = sum(map(len, docs)) / len(docs)
    scores = []
    for doc in docs:
        score = 0.0
        for term in words(query):
            n, f = sum(term in other for other in docs), doc.count(term)
            if f:
                idf = math.log(1 + (len(docs) - n + 0.5) / (n + 0.5))
                score += idf * f * (k1 + 1) / (f + k1 * (1 - b + b * len(doc) / average))
        scores.append(score)
    return scores


_TEXT = st.lists(st.sampled_from(["a", "b", "c", "d", "über", "東京", "?"]), max_size=6).map(" ".join)


@given(
    st.lists(_TEXT, min_size=1, max_size=8), _TEXT, st.sampled_from([0.0, 1.2, 1.5]), st.sampled_from([0.0, 0.75, 1.0])
)
def test_bm25_is_the_formula(texts, query, k1, b):
    scores = BM25Retriever(corpus(*texts), k1=k1, b=b).scores(query)
    assert scores.tolist() == pytest.approx(_plain_bm25(texts, query, k1, b), abs=1e-12)


def test_bm25_counts_a_repeated_query_term_each_time():
    retriever = BM25Retriever(corpus("a b", "a c", "d"))
    np.testing.assert_allclose(retriever.scores("a a b"), 2 * retriever.scores("a") + retriever.scores("b"))


@pytest.mark.parametrize("setting", [{"k1": -0.1}, {"k1": math.inf}, {"k1": math.nan}, {"b": -0.1}, {"b": 1.1}])
def test_bm25_refuses_parameters_out_of_range(setting):
    with pytest.raises(ValueError, match="BM25 needs"):
        BM25Retriever(FACTS, **setting)


# --- what all retrievers do --------------------------------------------------------------------------------------


@pytest.fixture(params=RETRIEVERS, ids=lambda kind: kind.__name__)
def build(request):
    return request.param


def test_the_best_passage_comes_first(build):
    retriever = build(FACTS)
    for query, doc_id in [("RMSNorm publication year", "doc-0014-0"), ("Stack-100M RoPE base", "doc-0009-0")]:
        hits = retriever.search(query, 3)
        assert ids(hits)[0] == doc_id
        assert [score for _, score in hits] == sorted((score for _, score in hits), reverse=True)
        assert hits[0][0] in FACTS
        assert type(hits[0][1]) is float


def test_equal_scores_keep_the_order_of_the_corpus(build):
    retriever = build(corpus(*["same text"] * 50, "same text again", "other"))
    assert ids(retriever.search("same", 3)) == ["d0", "d1", "d2"]
    assert ids(retriever.search("same", 50)) == [f"d{place}" for place in range(50)]


def test_passages_without_anything_of_the_query_are_no_hits(build):
    assert ids(build(corpus("red apple", "green pear", "apple pie")).search("apple", 3)) == ["d0", "d2"]
    assert build(FACTS).search("zzz qqq", 5) == []


@pytest.mark.parametrize("k", [0, -1, -(10**9)])
def test_no_k_no_hits(build, k):
    assert build(FACTS).search("hidden size", k) == []


@pytest.mark.parametrize("k", [3, 4, 10**9])
def test_k_may_exceed_the_corpus(build, k):
    assert len(build(corpus("a word", "a word", "one word")).search("word", k)) == 3


@pytest.mark.parametrize("query", ["", " \n\t", "?!...", "→ ★ 😀", "\u200b\u00ad", "\ud800"])
def test_a_query_without_words_has_no_hits(build, query):
    assert build(FACTS).search(query, 5) == []


@pytest.mark.parametrize("texts", [[], [""], ["", "?!"], ["→"] * 3])
def test_a_corpus_without_words_has_no_hits(build, texts):
    assert build(corpus(*texts)).search("hidden size", 5) == []


def test_an_empty_passage_among_others_is_never_a_hit(build):
    assert ids(build(corpus("", "word", "?")).search("word", 5)) == ["d1"]


def test_several_passages_may_share_an_id(build):
    hits = build([Passage("d", "first word"), Passage("d", "second word")]).search("word", 5)
    assert [passage.text for passage, _ in hits] == ["first word", "second word"]


def test_both_normal_forms_of_an_accent_are_the_same(build):
    texts = ["Résumé of Müller", "the résumé", "El Niño in Kraków"]
    composed, decomposed = (
        build(corpus(*(unicodedata.normalize(form, text) for text in texts))) for form in ("NFC", "NFD")
    )
    for query in ("résumé müller", "NIÑO", "Kraków"):
        expected = [
            (passage.doc_id, score) for passage, score in composed.search(unicodedata.normalize("NFC", query), 3)
        ]
        assert expected
        for retriever in (composed, decomposed):
            for form in ("NFC", "NFD"):
                hits = retriever.search(unicodedata.normalize(form, query), 3)
                assert [(passage.doc_id, score) for passage, score in hits] == expected


@pytest.mark.parametrize(
    ("query", "doc_id"),
    [
        ("東京", "d0"),
        ("京", "d0"),
        ("スカイツリー", "d1"),
        ("ｽｶｲﾂﾘｰ", "d1"),
        ("서울", "d2"),
        ("Москва", "d3"),
        ("МОСКВА", "d3"),  # noqa: RUF001
        ("हिन्दी", "d4"),
        ("القاهرة", "d5"),
        ("กรุงเทพ", "d6"),
        ("ΣΊΣΥΦΟΣ", "d7"),
        ("STRASSE", "d8"),
    ],
)
def test_text_of_any_script_is_found(build, query, doc_id):
    texts = [
        "私は東京都に住んでいます。",
        "スカイツリーの高さは634メートル",
        "서울은 한국의 수도이다",
        "Столица России - Москва.",
        "मैं हिन्दी बोलता हूँ",
        "القاهرة عاصمة مصر",
        "ฉันอยู่กรุงเทพมหานคร",
        "ο μύθος του Σίσυφος",  # noqa: RUF001
        "die Straße",
    ]
    assert ids(build(corpus(*texts)).search(query, 1)) == [doc_id]


def test_a_retriever_can_be_pickled(build):
    retriever = build(FACTS)
    copy = pickle.loads(pickle.dumps(retriever))
    assert copy.search("hidden size of R-017", 9) == retriever.search("hidden size of R-017", 9)


def test_many_threads_get_the_answers_of_one(build):
    retriever = build(FACTS)
    queries = [passage.text for passage in FACTS] * 2
    alone = [retriever.search(query, 3) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: retriever.search(query, 3), queries)) == alone


def test_a_long_query_costs_little(build):
    retriever = build(corpus(*["the cat sat on the mat"] * 2000))
    start = time.perf_counter()
    assert len(retriever.search("the cat " * 50_000, 3)) == 3
    assert time.perf_counter() - start < 2


@given(st.lists(st.text(max_size=30), max_size=6), st.text(max_size=30), st.integers(-1, 8))
@settings(max_examples=150)
def test_any_text_is_searchable(texts, query, k):
    for kind in RETRIEVERS:
        retriever = kind(corpus(*texts))
        hits = retriever.search(query, k)
        assert len(hits) <= max(k, 0)
        assert all(score > 0 for _, score in hits)
        order = [(-score, int(passage.doc_id[1:])) for passage, score in hits]
        assert order == sorted(order)
        for text in texts:
            if words(text):
                assert retriever.search(text, 1)


# --- hashing -----------------------------------------------------------------------------------------------------


def test_hashing_scores_are_cosines():
    retriever = HashingRetriever(FACTS)
    for place in (0, 100, 267):
        scores = retriever.scores(FACTS[place].text)
        assert scores[place] == pytest.approx(1, abs=1e-6)
        assert scores.min() >= 0
        assert scores.max() <= 1 + 1e-6


def test_hashing_forgives_inflection_and_typing_errors():
    retriever = HashingRetriever(corpus("normalization layers", "attention heads", "tokenizer vocabulary"))
    for query, doc_id in [("normalisation layer", "d0"), ("atention head", "d1"), ("tokenizers", "d2")]:
        assert ids(retriever.search(query, 1)) == [doc_id]


def test_hashing_is_the_same_in_every_process():
    code = (
        "from stacklm_hf.tools import HashingRetriever, Passage\n"
        "r = HashingRetriever([Passage('a', 'the hidden size'), Passage('b', 'größe 東京')])\n"
        "print(r._features.tolist(), r.scores('hidden größe').tolist())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(runs) == 1
    assert runs.pop().strip()


# --- words -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The RoPE-base of Stack-100M_v2", ["the", "rope", "base", "of", "stack", "100m", "v2"]),
        ("it's 3.5%", ["it", "s", "3", "5"]),
        ("Ｆｕｌｌ　１２", ["full", "12"]),  # noqa: RUF001
        ("soft\u00adhyphen zero\u200bwidth", ["softhyphen", "zerowidth"]),
        ("Straße ﬁne", ["strasse", "fine"]),
        ("résumé resume", ["résumé", "resume"]),
        ("हिन्दी", ["हिन्दी"]),
        ("नमस्\u200dते", ["नमस्ते"]),
        ("東京都", ["東", "京", "都", "東京", "京都"]),
        ("GPT4は", ["gpt4", "は"]),
        ("猫", ["猫"]),
        ("서울", ["서", "울", "서울"]),
        ("", []),
        ("\ud800a\udfff", ["a"]),
    ],
)
def test_words(text, expected):
    assert words(text) == [unicodedata.normalize("NFKC", word) for word in expected]


@given(st.text(alphabet=st.characters(max_codepoint=127)))
def test_words_of_ascii_are_runs_of_letters_and_digits(text):
    assert words(text) == re.findall(r"[a-z0-9]+", text.lower())


@given(st.text())
@settings(max_examples=300)
def test_folding_is_stable_and_blind_to_the_normal_form(text):
    folded = fold(text)
    assert fold(folded) == folded
    assert fold(unicodedata.normalize("NFC", text)) == folded == fold(unicodedata.normalize("NFD", text))
    assert all(words(word) for word in words(text))


def test_a_run_of_marks_does_not_take_quadratic_time():
    start = time.perf_counter()
    words("a" + "\u0301\u0316" * 200_000)
    assert time.perf_counter() - start < 2


# --- ranking -----------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, math.nan]), max_size=30), st.integers(-2, 35))
def test_top_indices_are_a_stable_sort_of_what_is_above_zero(scores, k):
    expected = sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: -scores[i])[: max(k, 0)]
    assert top_indices(np.array(scores), k).tolist() == expected


# --- being a good guest ------------------------------------------------------------------------------------------


def test_building_an_index_stays_quiet(caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        BM25Retriever(FACTS)
    assert [record for record in caplog.records if record.name.startswith("bm25s")] == []
    assert capfd.readouterr() == ("", "")


def test_importing_the_tools_loads_nothing_heavy():
    code = (
        "import sys, stacklm_hf.tools\n"
        "print(sorted({'faiss', 'sentence_transformers', 'bm25s', 'scipy', 'sklearn'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert result.stdout.strip() == "[]"
