"""Intervals, pass@k, summaries, comparisons, and the table made of them."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
from episode_builder import (
    BASE,
    DOUBLE,
    LAYERS,
    LOOKUP,
    NORM,
    SUM,
    TASKS,
    YEAR,
    answer,
    calc,
    episode,
    malformed,
    search,
)
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from stacklm_hf.evaluation.metrics import EvaluationResult, compare, pass_at_k, sort_kinds, summarize, wilson_interval
from stacklm_hf.evaluation.table import format_markdown, format_score, format_table
from stacklm_hf.rollout.trajectory import StopReason, Trajectory

GOOD_LOOKUP = episode(LOOKUP, search("Stack-100M layer count", LAYERS), answer("30"))
BAD_LOOKUP = episode(LOOKUP, malformed(), answer("1536"))
GOOD_DOUBLE = episode(DOUBLE, search("RoFormer publication year", YEAR), calc("2021*2", "4042"), answer("4042"))
GOOD_SUM = episode(
    SUM,
    search("RMSNorm publication year", NORM),
    search("Stack-100M RoPE base", BASE),
    calc("2019+10000", "12019"),
    answer("12019"),
)


def many(template: Trajectory, outcomes: list[bool], samples: int = 1, **fields) -> list[Trajectory]:
    """One episode per outcome; `samples` neighbours share a task."""
    return [
        replace(template, task_id=f"{template.kind}-{i // samples}", episode_id=f"e{i}", correct=outcome, **fields)
        for i, outcome in enumerate(outcomes)
    ]


class TestWilsonInterval:
    # Expected values: scipy.stats.binomtest(successes, n).proportion_ci(0.95, method="wilson").
    @pytest.mark.parametrize(
        ("successes", "n", "low", "high"),
        [(0, 50, 0.0, 0.0713), (50, 50, 0.9287, 1.0), (49, 50, 0.8950, 0.9965), (5, 10, 0.2366, 0.7634)],
    )
    def test_known_values(self, successes, n, low, high):
        assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)

    def test_its_ends_are_where_the_score_test_just_rejects(self):
        """The definition: |p - q| = z sqrt(q(1-q)/n) at both ends q."""
        for end in wilson_interval(30, 80, confidence=0.9):
            assert abs(30 / 80 - end) == pytest.approx(1.6448536 * math.sqrt(end * (1 - end) / 80), rel=1e-6)

    def test_nothing_is_known_without_a_trial(self):
        assert wilson_interval(0, 0) == (0.0, 1.0)

    @pytest.mark.parametrize(
        ("successes", "n", "confidence"), [(3, 2, 0.95), (-1, 2, 0.95), (0, -1, 0.95), (1, 2, 1.0)]
    )
    def test_arguments_out_of_range(self, successes, n, confidence):
        with pytest.raises(ValueError, match="must lie between"):
            wilson_interval(successes, n, confidence)

    @given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
    def test_holds_the_share_and_stays_in_the_unit_interval(self, case):
        successes, n = case
        low, high = wilson_interval(successes, n)
        assert 0 <= low <= successes / n <= high <= 1
        assert low < high
        mirrored = wilson_interval(n - successes, n)
        assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((low, high))


class TestPassAtK:
    @given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
    def test_is_the_share_of_subsets_with_a_correct_sample(self, case):
        n, correct, k = case
        subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))

    @pytest.mark.parametrize(("n", "correct", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
    def test_arguments_out_of_range(self, n, correct, k):
        with pytest.raises(ValueError, match="pass@k"):
            pass_at_k(n, correct, k)


class TestSummarize:
    def test_counts_every_episode_once_by_shape_and_by_split(self):
        other = replace(GOOD_LOOKUP, split="other facts", task_id="lookup-1", grounded=False)
        result = summarize([GOOD_LOOKUP, BAD_LOOKUP, GOOD_DOUBLE, other], TASKS, label="after SFT")
        assert (result.overall.n, result.overall.correct, result.overall.tasks) == (4, 3, 3)
        assert {kind: score.n for kind, score in result.by_kind.items()} == {"lookup": 3, "double": 1}
        assert {split: score.n for split, score in result.by_split.items()} == {"heldout": 3, "other facts": 1}
        assert result.by_split_kind["heldout"]["lookup"].n == 2
        assert result.overall.grounded == 0.5
        assert sum(result.failures.values()) == 1
        assert result.failures["malformed"] == 1
        assert result.stop_reasons == {"answered": 4}

    def test_effort_is_the_mean_per_episode(self):
        score = summarize([GOOD_LOOKUP, GOOD_SUM, BAD_LOOKUP]).overall
        assert score.calls == pytest.approx((1 + 3 + 0) / 3)  # a malformed turn is a step, not a call
        assert score.steps == pytest.approx((2 + 4 + 2) / 3)
        records = [GOOD_LOOKUP, GOOD_SUM, BAD_LOOKUP]
        assert score.own_tokens == pytest.approx(sum(sum(record.sampled) for record in records) / 3)
        assert score.total_tokens == pytest.approx(sum(len(record.token_ids) for record in records) / 3)

    def test_an_error_counts_as_wrong(self):
        result = summarize([GOOD_LOOKUP, episode(SUM, stop=StopReason.ERROR)])
        assert result.overall.accuracy == 0.5
        assert result.failures["error"] == 1

    def test_one_sample_per_task_gives_no_pass_at_k(self):
        assert summarize([GOOD_LOOKUP, GOOD_SUM]).overall.pass_at == {}

    def test_several_samples_give_avg_at_n_over_tasks_and_pass_at_k(self):
        outcomes = [True, False, False, False] + [True] * 4
        score = summarize(many(GOOD_LOOKUP, outcomes, samples=4)).overall
        assert (score.n, score.tasks, score.accuracy) == (8, 2, (0.25 + 1) / 2)
        assert score.pass_at == pytest.approx({1: 0.625, 2: (0.5 + 1) / 2, 4: 1.0})

    def test_a_task_weighs_the_same_however_many_samples_it_has(self):
        often = many(GOOD_LOOKUP, [True] * 6, samples=6)
        once = many(GOOD_SUM, [False])
        score = summarize([*often, *once]).overall
        assert score.accuracy == 0.5
        assert score.pass_at == {}

    def test_the_interval_counts_tasks_not_samples(self):
        score = summarize(many(GOOD_LOOKUP, [True] * 40, samples=8)).overall
        assert (score.low, score.high) == pytest.approx(wilson_interval(5, 5))

    def test_episodes_without_a_task_id_are_tasks_of_their_own(self):
        records = [replace(GOOD_LOOKUP, task_id="", episode_id=name) for name in "ab"]
        assert summarize(records).overall.tasks == 2

    def test_nothing_to_summarize(self):
        result = summarize([])
        assert (result.overall.n, result.overall.low, result.overall.high) == (0, 0.0, 1.0)
        assert result.by_kind == {}

    def test_goes_through_json_without_loss(self):
        records = many(GOOD_LOOKUP, [True, False, True, True, False, False], samples=3)
        result = summarize([*records, GOOD_SUM], TASKS, label="é < after", confidence=0.9)
        assert EvaluationResult.from_json(result.to_json()) == result
        assert json.loads(result.to_json())["overall"]["n"] == 7

    @pytest.mark.parametrize("text", ["{}", "[]", '{"overall": 3}', "nonsense"])
    def test_other_json_is_refused(self, text):
        with pytest.raises(ValueError, match=r"not an evaluation result|Expecting"):
            EvaluationResult.from_json(text)


class TestCompare:
    def test_change_by_shape_with_all_last(self):
        before = summarize(many(GOOD_LOOKUP, [False] * 10) + many(GOOD_SUM, [True] * 5))
        after = summarize(many(GOOD_LOOKUP, [True] * 8 + [False] * 2) + many(GOOD_SUM, [True] * 5))
        changes = compare(before, after)
        assert list(changes) == ["lookup", "sum", "all"]
        assert changes["lookup"].change == pytest.approx(0.8)
        assert changes["sum"].change == 0
        assert (changes["all"].shared, changes["all"].gained, changes["all"].lost) == (15, 8, 0)

    def test_newcombe_interval(self):
        """Newcombe 1998, table II, column (a): 56/70 against 48/80 gives 0.0524 to 0.3339 by method 10."""
        before = summarize(many(GOOD_LOOKUP, [True] * 48 + [False] * 32))
        after = summarize(many(GOOD_LOOKUP, [True] * 56 + [False] * 14))
        change = compare(before, after)["all"]
        assert (change.low, change.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)

    def test_sign_test(self):
        """One lost and five gained of six: 2 * (1 + 6) / 2**6."""
        before = summarize(many(GOOD_LOOKUP, [True] + [False] * 5 + [True] * 4))
        after = summarize(many(GOOD_LOOKUP, [False] + [True] * 5 + [True] * 4))
        change = compare(before, after)["all"]
        assert (change.gained, change.lost) == (5, 1)
        assert change.p_value == pytest.approx(14 / 64)
        assert compare(before, before)["all"].p_value == 1

    def test_only_shared_tasks_are_paired(self):
        before = summarize(many(GOOD_LOOKUP, [False, False]))
        after = summarize(many(GOOD_LOOKUP, [True, True, True]))
        assert compare(before, after)["all"].shared == 2

    def test_confidence_levels_must_agree(self):
        with pytest.raises(ValueError, match="cannot compare"):
            compare(summarize([GOOD_SUM]), summarize([GOOD_SUM], confidence=0.9))


def test_known_shapes_come_first():
    assert sort_kinds(["zebra", "sum", "ask", "lookup", "sum"]) == ["lookup", "sum", "ask", "zebra"]


class TestTable:
    BEFORE = summarize(many(GOOD_LOOKUP, [False] * 20) + many(GOOD_SUM, [False] * 30))
    AFTER = summarize(many(GOOD_LOOKUP, [True] * 20) + many(GOOD_SUM, [True] * 29 + [False]))

    def test_reads_like_this(self):
        assert format_table({"before SFT": self.BEFORE, "after SFT": self.AFTER}) == (
            "shape    n         before SFT          after SFT\n"
            "------------------------------------------------\n"
            "lookup  20  0.00 [0.00, 0.16]  1.00 [0.84, 1.00]\n"
            "sum     30  0.00 [0.00, 0.11]  0.97 [0.83, 0.99]\n"
            "------------------------------------------------\n"
            "all     50  0.00 [0.00, 0.07]  0.98 [0.90, 1.00]\n"
            "\n"
            "Accuracy [95% Wilson interval]; n: tasks."
        )

    def test_three_runs_fit_side_by_side(self):
        lines = format_table(
            {"before SFT": self.BEFORE, "after SFT": self.AFTER, "after GRPO": self.AFTER}
        ).splitlines()
        assert lines[0].split("  ")[0] == "shape"
        assert all(label in lines[0] for label in ("before SFT", "after SFT", "after GRPO"))

    def test_runs_over_different_tasks_bring_their_own_n(self):
        fewer = summarize(many(GOOD_LOOKUP, [True] * 4))
        lines = format_table({"a": self.AFTER, "b": fewer}).splitlines()
        assert lines[0].split() == ["shape", "n", "a", "n", "b"]
        assert lines[2].split()[1] == "20"
        assert lines[3].split()[-2:] == ["0", "-"]

    def test_several_samples_are_named(self):
        assert "up to 4 samples each (avg@n)" in format_table({"a": summarize(many(GOOD_SUM, [True] * 8, samples=4))})

    def test_markdown(self):
        lines = format_markdown({"a|b *x* <i>": self.AFTER}).splitlines()
        assert lines[0] == r"| shape | n | a\|b \*x\* &lt;i&gt; |"
        assert lines[1] == "| --- | ---: | ---: |"
        assert lines[2] == "| lookup | 20 | 1.00 [0.84, 1.00] |"
        assert lines[-1] == "Accuracy [95% Wilson interval]; n: tasks."

    def test_nothing_to_report_is_a_dash(self):
        assert format_score(None) == format_score(summarize([]).overall) == "-"
        assert format_table({"empty": summarize([])}).splitlines()[2].split() == ["all", "0", "-"]

    def test_wrong_use(self):
        with pytest.raises(ValueError, match="no evaluation"):
            format_table({})
        with pytest.raises(ValueError, match="width"):
            format_table({"a": self.AFTER}, width=20)

    @given(
        labels=st.lists(st.text(max_size=40), min_size=1, max_size=7, unique=True),
        kind=st.text(max_size=40).filter(lambda kind: kind != "sum"),
        width=st.integers(60, 120),
    )
    def test_never_wider_than_asked_whatever_the_names(self, labels, kind, width):
        result = summarize([*many(GOOD_LOOKUP, [True] * 3, kind=kind), GOOD_SUM])
        text = format_table(dict.fromkeys(labels, result), width=width)
        assert all(cell_len(line) <= width for line in text.split("\n"))
        rows = format_markdown(dict.fromkeys(labels, result)).split("\n")
        assert len(rows) == 2 + 2 + 1 + 2  # head, rule, two shapes, all, a blank line, the note
        assert len({len(row.replace(r"\|", "").split("|")) for row in rows[:5]}) == 1
