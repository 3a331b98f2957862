"""Each passage states its fact word for word and is found by its own query; long documents are cut with overlap."""

from __future__ import annotations

import itertools
import re
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stacklm_hf.tools import BM25Retriever
from stacklm_hf.worlds.research import build_corpus, chunk_document, make_facts
from stacklm_hf.worlds.research.corpus import FILLERS, FORMS, render_passage
from stacklm_hf.worlds.research.facts import REAL_FACTS

SEEDS = range(4)


def test_ids_and_order_follow_the_facts() -> None:
    corpus = build_corpus(0)
    assert [passage.doc_id for passage in corpus] == [f"doc-{index:04d}-0" for index in range(268)]
    assert build_corpus(0, n_distractors=5) == corpus[:38]
    assert build_corpus(0) == corpus


@pytest.mark.parametrize("seed", SEEDS)
def test_each_clause_stands_in_its_own_passage_and_in_no_other(seed: int) -> None:
    corpus = build_corpus(seed)
    for index, fact in enumerate(make_facts(seed)):
        stated = f"the {fact.attribute} of {fact.entity} is {fact.value}"
        assert [i for i, passage in enumerate(corpus) if stated in passage.text] == [index]
        assert re.search(re.escape(stated) + r"[,.] ", corpus[index].text)


@pytest.mark.parametrize("seed", SEEDS)
def test_bm25_ranks_the_passage_of_every_fact_first(seed: int) -> None:
    retriever = BM25Retriever(build_corpus(seed))
    for index, fact in enumerate(make_facts(seed)):
        (best, _), *_ = retriever.search(f"{fact.entity} {fact.attribute}", 2)
        assert best.doc_id == f"doc-{index:04d}-0"


@pytest.mark.parametrize("seed", SEEDS)
def test_passages_have_about_28_words_and_all_three_forms(seed: int) -> None:
    lengths = [len(passage.text.split()) for passage in build_corpus(seed)]
    assert mean(lengths) == pytest.approx(28, abs=0.5)
    assert min(lengths) >= 22
    assert max(lengths) <= 34
    openings = {form: re.escape(form[: form.index("{clause}")].split()[-1]) for form in FORMS}
    assert len(openings) == 3
    for opening in openings.values():
        hits = sum(re.search(rf"{opening} the ", passage.text) is not None for passage in build_corpus(seed))
        assert hits > 50


def test_the_filler_holds_no_digit_and_no_word_that_a_query_looks_for() -> None:
    filler = " ".join(
        [*(re.sub(r"{\w+}", "", form) for form in FORMS), *(text for row in FILLERS.values() for text in row)]
    )
    assert not re.search(r"\d", filler)
    query_words = {word for fact in make_facts(0) for word in re.findall(r"[a-z0-9]+", fact.query.lower())}
    assert query_words & set(re.findall(r"[a-z0-9]+", filler.lower())) == {"the"}


def test_the_wording_follows_from_seed_and_index_alone() -> None:
    fact, other = REAL_FACTS[0], REAL_FACTS[12]
    text = render_passage(fact, 3, 7)
    assert render_passage(fact, 3, 7) == text
    assert render_passage(other, 3, 7).replace(other.clause, fact.clause) == text
    assert len({render_passage(fact, seed, index) for seed in range(5) for index in range(5)}) > 20


def test_a_document_of_80_words_is_one_chunk_and_one_of_81_is_two() -> None:
    text = " ".join(f"w{i}" for i in range(81))
    assert chunk_document(text.rsplit(" ", 1)[0]) == [text.rsplit(" ", 1)[0]]
    first, second = chunk_document(text)
    assert first.split() == text.split()[:80]
    assert second.split() == text.split()[64:]


def test_a_blank_document_has_no_chunk() -> None:
    assert chunk_document(" \n\t ") == []


@pytest.mark.parametrize(("words", "overlap"), [(4, 4), (4, 5), (4, -1), (0, 0)])
def test_an_overlap_that_makes_no_headway_is_refused(words: int, overlap: int) -> None:
    with pytest.raises(ValueError, match="cannot overlap"):
        chunk_document("a b c", words, overlap)


@given(
    st.lists(st.text(min_size=1, max_size=5).filter(lambda word: len(word.split()) == 1), max_size=120),
    st.integers(1, 30).flatmap(lambda words: st.tuples(st.just(words), st.integers(0, words - 1))),
)
def test_chunks_keep_every_word_in_order_and_overlap_exactly(text: list[str], sizes: tuple[int, int]) -> None:
    words, overlap = sizes
    original = " ".join(text).split()
    chunks = [chunk.split() for chunk in chunk_document(" ".join(text), words, overlap)]
    rebuilt = [word for position, chunk in enumerate(chunks) for word in (chunk[overlap:] if position else chunk)]
    assert rebuilt == original
    assert all(len(chunk) == words for chunk in chunks[:-1])
    assert all(len(chunk) <= words for chunk in chunks)
    for before, after in itertools.pairwise(chunks):
        assert after[:overlap] == before[len(before) - overlap :]
        assert len(after) > overlap  # each chunk brings something new
