"""The passages of the research world, and the chunking of long documents.

Contract: each fact stands in exactly one passage, word for word as `the {attribute} of {entity} is {value}`
and followed by a comma or a period. Everything else in a passage is filler that holds no digit and no word of
any query but `the`, and names the entity just that once: a keyword search for
`{entity} {attribute}` therefore ranks the fact's own passage first, however the filler falls.
"""

from __future__ import annotations

import random

from stacklm_hf.tools.retrieval import Passage
from stacklm_hf.worlds.research.facts import N_RUNS, Fact, make_facts

CHUNK_WORDS = 80
CHUNK_OVERLAP = 16

# Three forms of a passage; every blank but {clause} is filled from FILLERS.
FORMS: tuple[str, ...] = (
    "{Source} was checked by {people}. It says that {clause}, and {status}.",
    "{Readers} who look this up usually open {source}. As noted there, {clause}, which {agreement}.",
    "For reference, {clause}. This comes from {source}, where {people} noted it {moment}.",
)
FILLERS: dict[str, tuple[str, ...]] = {
    "source": (
        "the lab notebook",
        "the project wiki",
        "the index card",
        "the shared spreadsheet",
        "the summary table",
        "the internal handbook",
        "the annotated bibliography",
        "the seminar handout",
    ),
    "people": (
        "two colleagues",
        "the maintainers",
        "a careful reviewer",
        "the documentation team",
        "several contributors",
        "an independent auditor",
    ),
    "readers": ("Readers", "Newcomers", "Students", "Engineers", "Colleagues", "Visitors"),
    "status": (
        "nobody has corrected that entry since",
        "later reports repeat it without change",
        "the entry has been stable ever since",
        "every later draft agrees with it",
        "no open comment disputes it",
        "the original notes say the same",
    ),
    "agreement": (
        "agrees with everything else we know",
        "was confirmed again during the last review",
        "other write-ups quote without change",
        "matches the original announcement exactly",
        "has never been disputed so far",
        "the authors confirmed when asked",
    ),
    "moment": (
        "shortly after the announcement",
        "while preparing the final report",
        "during a careful review",
        "for the benefit of newcomers",
        "so that others could verify it",
        "right after the first meeting",
    ),
}


def render_passage(fact: Fact, seed: int, index: int) -> str:
    """The passage that states a fact.

    Args:
        fact: The fact.
        seed: Seed of the world.
        index: Position of the fact in the corpus. Form and filler follow from `(seed, index)` alone, by a
            generator of their own, so that the facts of a seed do not depend on the wording.

    Returns:
        About 28 words.
    """
    rng = random.Random(f"passage/{seed}/{index}")  # text seeds are hashed with SHA-512: the same everywhere
    form = rng.choice(FORMS)
    blanks = {name: rng.choice(choices) for name, choices in FILLERS.items()}
    blanks["Source"] = blanks["source"].capitalize()
    blanks["Readers"] = blanks["readers"]
    return form.format(clause=fact.clause, **blanks)


def chunk_document(text: str, words: int = CHUNK_WORDS, overlap: int = CHUNK_OVERLAP) -> list[str]:
    """Cuts a document into chunks of at most `words` words, each starting with the last `overlap` of the one before.

    Words are runs of non-blank characters and are joined by one space. There is no chunk that the one before
    already holds in full, so a document of at most `words` words is one chunk, and a blank one is none.

    Args:
        text: The document.
        words: Words per chunk.
        overlap: Words shared by neighbouring chunks.

    Raises:
        ValueError: Not `0 <= overlap < words`.
    """
    if not 0 <= overlap < words:
        raise ValueError(f"chunks of {words} words cannot overlap by {overlap}: use 0 <= overlap < words")
    parts = text.split()
    last_start = max(len(parts) - overlap, 1)
    return [" ".join(parts[start : start + words]) for start in range(0, last_start, words - overlap) if parts]


def chunk_passages(
    document_id: str, text: str, words: int = CHUNK_WORDS, overlap: int = CHUNK_OVERLAP
) -> list[Passage]:
    """The chunks of one document as passages, with ids `{document_id}-{chunk}` counted from 0."""
    return [
        Passage(f"{document_id}-{chunk}", chunk_text)
        for chunk, chunk_text in enumerate(chunk_document(text, words, overlap))
    ]


def build_corpus(seed: int = 0, n_distractors: int = N_RUNS) -> list[Passage]:
    """The corpus of a world: one passage per fact, ids `doc-{index:04d}-{chunk}`.

    Args:
        seed: Seed of the world.
        n_distractors: Number of synthetic runs, of two passages each, after the 28 real ones.

    Raises:
        ValueError: `n_distractors` is negative.
    """
    corpus = []
    for index, fact in enumerate(make_facts(seed, n_distractors)):
        corpus += chunk_passages(f"doc-{index:04d}", render_passage(fact, seed, index))
    return corpus
