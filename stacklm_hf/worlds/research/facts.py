"""The facts of the research world: 28 real ones, and two for each synthetic run.

Contract: `make_facts(seed, n_distractors)` is a pure function; its order is the order of the corpus, and so of
the document ids. The real facts come first and are the same for every seed; the facts of the runs are drawn
from `random.Random(seed)` and nothing else draws from that generator.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """One triple; a passage states it as `the {attribute} of {entity} is {value}`.

    Args:
        entity: What the fact is about, e.g. `Stack-100M`.
        attribute: What is said of it, e.g. `RoPE base`.
        value: A whole number as text.
    """

    entity: str
    attribute: str
    value: str

    @property
    def key(self) -> tuple[str, str]:
        """`(entity, attribute)`: unique within one seed of the world."""
        return self.entity, self.attribute

    @property
    def clause(self) -> str:
        """The words by which a passage states the fact."""
        return f"the {self.attribute} of {self.entity} is {self.value}"

    @property
    def query(self) -> str:
        """The search query that finds the fact."""
        return f"{self.entity} {self.attribute}"


_MODEL = "Stack-100M"
_MODEL_FACTS = {
    "hidden size": 512,
    "layer count": 30,
    "vocabulary size": 32768,
    "query head count": 8,
    "key-value head count": 2,
    "head dimension": 64,
    "MLP inner dimension": 1408,
    "pretraining sequence length": 2048,
    "mid-training sequence length": 8192,
    "RoPE base": 10000,
    "parameter count in millions": 101,
    "pretraining token budget in billions": 20,
}
_PUBLICATION_YEARS = {
    "the Transformer paper": 2017,
    "Adam": 2014,
    "RMSNorm": 2019,
    "SwiGLU": 2020,
    "RoFormer": 2021,
    "LoRA": 2021,
    "Chinchilla": 2022,
    "FlashAttention": 2022,
    "ReAct": 2022,
    "STaR": 2022,
    "Toolformer": 2023,
    "DPO": 2023,
    "grouped-query attention": 2023,
    "DeepSeekMath": 2024,
    "Muon": 2024,
    "MobileLLM": 2024,
}

REAL_FACTS: tuple[Fact, ...] = (
    *(Fact(_MODEL, attribute, str(value)) for attribute, value in _MODEL_FACTS.items()),
    *(Fact(entity, "publication year", str(year)) for entity, year in _PUBLICATION_YEARS.items()),
)

RUN_ATTRIBUTES: tuple[str, ...] = (
    "hidden size",
    "layer count",
    "MLP inner dimension",
    "vocabulary size",
    "head dimension",
)
RUN_VALUES: tuple[int, ...] = (128, 192, 256, 384, 640, 768, 896, 1024, 1536)
N_RUNS = 120


def make_run_facts(seed: int = 0, n_distractors: int = N_RUNS) -> list[Fact]:
    """Two facts for each of `n_distractors` synthetic runs.

    The same run has other attributes and values under another seed.

    Args:
        seed: Seed of the world.
        n_distractors: Number of runs, R-000 onwards.

    Returns:
        `2 * n_distractors` facts in corpus order.

    Raises:
        ValueError: `n_distractors` is negative.
    """
    if n_distractors < 0:
        raise ValueError(f"n_distractors must be 0 or more, not {n_distractors}")
    rng = random.Random(seed)
    facts = []
    for run in range(n_distractors):
        for attribute in rng.sample(RUN_ATTRIBUTES, 2):
            facts.append(Fact(f"ablation run R-{run:03d}", attribute, str(rng.choice(RUN_VALUES))))
    return facts


def make_facts(seed: int = 0, n_distractors: int = N_RUNS) -> list[Fact]:
    """All facts of a world in corpus order: the real ones, then those of the runs.

    Args:
        seed: Seed of the world.
        n_distractors: Number of synthetic runs.
    """
    return [*REAL_FACTS, *make_run_facts(seed, n_distractors)]
