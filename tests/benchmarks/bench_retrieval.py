"""BM25: milliseconds per query of the index against a plain loop over the passages, in one run.

    python tests/benchmarks/bench_retrieval.py
    python tests/benchmarks/bench_retrieval.py --sizes 268 10000 --queries 50

The corpus looks like the research world's: facts of runs in about 28 words, filled up with words drawn by Zipf's law.
Each query shares frequent words with every passage ("the", "of", "run"), so the long lists of the index are walked.
The plain loop scores passage by passage from counts made beforehand, and both must give the same top five.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections import Counter

from stacklm_hf.tools import BM25Retriever, HashingRetriever, Passage
from stacklm_hf.tools.retrieval import words

ATTRIBUTES = ["hidden size", "layer count", "MLP inner dimension", "vocabulary size", "head dimension"]
FILLER = 18


def make_passages(count: int, rng: random.Random) -> list[Passage]:
    """Passages of about 28 words, each with one fact."""
    vocabulary = [f"word{rank}" for rank in range(20_000)]
    weights = [1 / (rank + 1) for rank in range(len(vocabulary))]
    filler = rng.choices(vocabulary, weights, k=FILLER * count)
    passages = []
    for place in range(count):
        fact = f"the {rng.choice(ATTRIBUTES)} of ablation run R-{place:06d} is {rng.choice([128, 256, 512, 1024])}."
        passages.append(Passage(f"doc-{place}", " ".join(filler[place * FILLER : (place + 1) * FILLER]) + ", " + fact))
    return passages


class PlainLoop:
    """BM25 as one writes it first: for each passage, for each term of the query."""

    def __init__(self, passages: list[Passage], k1: float = 1.5, b: float = 0.75) -> None:
        self.passages = passages
        self.counts = [Counter(words(passage.text)) for passage in passages]
        self.lengths = [counts.total() for counts in self.counts]
        self.average = sum(self.lengths) / len(self.lengths)
        self.document_frequency = Counter(term for counts in self.counts for term in counts)
        self.k1, self.b = k1, b

    def search(self, query: str, k: int) -> list[tuple[Passage, float]]:
        terms = words(query)
        total = len(self.passages)
        idf = {
            t: math.log(1 + (total - self.document_frequency[t] + 0.5) / (self.document_frequency[t] + 0.5))
            for t in terms
        }
        scored = []
        for place, (counts, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
            norm = self.k1 * (1 - self.b + self.b * length / self.average)
            score = sum(idf[t] * counts[t] * (self.k1 + 1) / (counts[t] + norm) for t in terms if t in counts)
            if score > 0:
                scored.append((-score, place))
        return [(self.passages[place], -score) for score, place in sorted(scored)[:k]]


def per_query_ms(retriever: BM25Retriever | HashingRetriever | PlainLoop, queries: list[str]) -> float:
    """Median milliseconds of one search for five passages."""
    times = []
    for query in queries:
        start = time.perf_counter()
        retriever.search(query, 5)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[268, 10_000, 100_000], help="numbers of passages")
    parser.add_argument("--queries", type=int, default=200, help="queries for the index")
    parser.add_argument("--plain-queries", type=int, default=5, help="queries for the plain loop, which is slow")
    parser.add_argument("--hashing", action="store_true", help="also time the hashing retriever")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    print(f"{'passages':>9} {'build s':>8} {'BM25 ms/query':>14} {'plain ms/query':>15} {'ratio':>7}")
    for size in options.sizes:
        rng = random.Random(options.seed)
        passages = make_passages(size, rng)
        queries = [
            f"the {rng.choice(ATTRIBUTES)} of ablation run R-{rng.randrange(size):06d}" for _ in range(options.queries)
        ]
        start = time.perf_counter()
        retriever = BM25Retriever(passages)
        built = time.perf_counter() - start
        plain = PlainLoop(passages)
        for query in queries[: options.plain_queries]:
            fast, slow = retriever.search(query, 5), plain.search(query, 5)
            if any(abs(a[1] - b[1]) > 1e-9 for a, b in zip(fast, slow, strict=True)):
                raise SystemExit(f"the index and the plain loop disagree on {query!r}")
        fast_ms = per_query_ms(retriever, queries)
        slow_ms = per_query_ms(plain, queries[: options.plain_queries])
        print(f"{size:>9,} {built:>8.2f} {fast_ms:>14.3f} {slow_ms:>15.3f} {slow_ms / fast_ms:>6.0f}x", flush=True)
        if options.hashing:
            start = time.perf_counter()
            hashing = HashingRetriever(passages)
            built = time.perf_counter() - start
            print(f"{'hashing':>9} {built:>8.2f} {per_query_ms(hashing, queries):>14.3f}", flush=True)


if __name__ == "__main__":
    main()
