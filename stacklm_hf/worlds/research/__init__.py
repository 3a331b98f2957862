"""The research world: facts in a corpus, questions with exact answers, splits, and a user's own documents."""

from stacklm_hf.tools.retrieval import Passage
from stacklm_hf.worlds.base import Task
from stacklm_hf.worlds.leaks import decontaminate, is_leak
from stacklm_hf.worlds.research.corpus import build_corpus, chunk_document
from stacklm_hf.worlds.research.environment import ResearchEnvironment, SeededEnvironment, World
from stacklm_hf.worlds.research.facts import Fact, make_facts
from stacklm_hf.worlds.research.own_documents import load_documents, load_qa_pairs
from stacklm_hf.worlds.research.splits import SPLITS, Split, make_split, make_training_pool
from stacklm_hf.worlds.research.tasks import (
    SHAPES,
    group_by_world_seed,
    make_task_pool,
    make_tasks,
    qa_pairs,
    world_seed_of,
)

__all__ = [
    "SHAPES",
    "SPLITS",
    "Fact",
    "Passage",
    "ResearchEnvironment",
    "SeededEnvironment",
    "Split",
    "Task",
    "World",
    "build_corpus",
    "chunk_document",
    "decontaminate",
    "group_by_world_seed",
    "is_leak",
    "load_documents",
    "load_qa_pairs",
    "make_facts",
    "make_split",
    "make_task_pool",
    "make_tasks",
    "make_training_pool",
    "qa_pairs",
    "world_seed_of",
]
