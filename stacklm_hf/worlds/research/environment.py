"""The research world as the episode loop sees it, over the built-in corpus or over a user's own documents.

Contract: an environment holds no state of an episode, so that any number of episodes may run on it at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from stacklm_hf.protocol.wire import system_prompt
from stacklm_hf.tools.bm25 import BM25Retriever
from stacklm_hf.tools.research import CalcTool, SearchTool
from stacklm_hf.tools.retrieval import Passage, Retriever
from stacklm_hf.tools.toolbox import ToolBox
from stacklm_hf.worlds.base import Session, Task
from stacklm_hf.worlds.leaks import decontaminate
from stacklm_hf.worlds.research.corpus import CHUNK_OVERLAP, CHUNK_WORDS, build_corpus
from stacklm_hf.worlds.research.facts import N_RUNS
from stacklm_hf.worlds.research.own_documents import Rows, load_documents, load_qa_pairs
from stacklm_hf.worlds.research.tasks import make_task_pool, world_seed_of


class ResearchEnvironment:
    """Search over passages, and a calculator.

    Args:
        passages: The corpus.
        retriever: Finds passages for a query; must have been built over `passages`. Default: BM25.
        name: Name of the world.
    """

    def __init__(self, passages: Sequence[Passage], retriever: Retriever | None = None, name: str = "research") -> None:
        self.name = name
        self.passages = list(passages)
        self.retriever = BM25Retriever(self.passages) if retriever is None else retriever
        self._toolbox = ToolBox([SearchTool(self.retriever), CalcTool()])
        self.tools = tuple(self._toolbox.specs)
        self.system_prompt = system_prompt(spec.signature() for spec in self.tools)

    def open(self, task: Task) -> AbstractContextManager[Session]:
        """The tools for one episode; they keep nothing between calls, so all episodes share them."""
        return nullcontext(self._toolbox)


class SeededEnvironment(ResearchEnvironment):
    """The built-in world of every seed: a task is asked over the corpus that its id names.

    Training pools mix tasks of several worlds, in which the same question has other answers.

    Args:
        seed: The seed whose corpus is built at once.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(build_corpus(seed))
        self._worlds: dict[int, ResearchEnvironment] = {seed: self}
        self._lock = threading.Lock()

    def open(self, task: Task) -> AbstractContextManager[Session]:
        """The tools over the task's own corpus, which is built at its first task.

        Raises:
            ValueError: The task is not one of the research world.
        """
        seed = world_seed_of(task)
        with self._lock:
            if seed not in self._worlds:
                self._worlds[seed] = ResearchEnvironment(build_corpus(seed))
        world = self._worlds[seed]
        return super().open(task) if world is self else world.open(task)


@dataclass(frozen=True)
class World:
    """Documents, and tasks over them.

    Args:
        name: Name of the world; stands in every task and trajectory.
        passages: The corpus.
        tasks: The tasks; their `split` says what they are for.
    """

    name: str
    passages: list[Passage]
    tasks: list[Task]

    @classmethod
    def research(cls, seed: int = 0, n_distractors: int = N_RUNS) -> World:
        """The built-in world of a seed with its published tasks, training before held-out ones.

        Args:
            seed: Seed of the world.
            n_distractors: Number of synthetic runs in the corpus.
        """
        train, heldout = make_task_pool(seed)
        return cls("research", build_corpus(seed, n_distractors), [*train, *heldout])

    @classmethod
    def from_documents(
        cls,
        documents: Rows,
        qa_pairs: Rows,
        *,
        name: str = "documents",
        text_column: str = "text",
        id_column: str | None = None,
        words: int = CHUNK_WORDS,
        overlap: int = CHUNK_OVERLAP,
        heldout_share: float = 0.2,
        seed: int = 0,
    ) -> World:
        """A world of a user's own documents and question/answer pairs.

        Args:
            documents: See :func:`stacklm_hf.worlds.research.own_documents.load_documents`.
            qa_pairs: See :func:`stacklm_hf.worlds.research.own_documents.load_qa_pairs`.
            name: Name of the world.
            text_column: Column with the text, where the documents are rows.
            id_column: Column with a unique id, where the documents are rows.
            words: Words per chunk.
            overlap: Words shared by neighbouring chunks.
            heldout_share: Share of the pairs to hold out, where they name no split.
            seed: Seed of that choice.

        Raises:
            ValueError: Something is wrong with the input; one line says what and where.
        """
        passages = load_documents(documents, text_column=text_column, id_column=id_column, words=words, overlap=overlap)
        return cls(name, passages, load_qa_pairs(qa_pairs, world=name, heldout_share=heldout_share, seed=seed))

    def split(self) -> tuple[list[Task], list[Task]]:
        """`(train, heldout)`: all tasks that are not of split `train` are held out, and no training task leaks one."""
        heldout = [task for task in self.tasks if task.split != "train"]
        return decontaminate([task for task in self.tasks if task.split == "train"], heldout), heldout

    def environment(self, retriever: Retriever | None = None) -> ResearchEnvironment:
        """Search and calculator over the world's passages.

        Args:
            retriever: Default: BM25.
        """
        return ResearchEnvironment(self.passages, retriever, self.name)
