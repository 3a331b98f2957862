"""Why an episode failed: each rule of the taxonomy, and that the causes add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from episode_builder import (
    BASE,
    COMPARE,
    DOUBLE,
    LAYERS,
    LOOKUP,
    NORM,
    OTHER,
    STAR,
    SUM,
    TASKS,
    YEAR,
    answer,
    calc,
    call,
    episode,
    forced,
    malformed,
    repeat,
    search,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from stacklm_hf.evaluation.failures import Failure, classify_failure, count_failures
from stacklm_hf.rollout.trajectory import Step, StepKind, StopReason
from stacklm_hf.worlds.base import Task

FIND_LAYERS = search("Stack-100M layer count", LAYERS)
FIND_YEAR = search("RoFormer publication year", YEAR)
FIND_NORM = search("RMSNorm publication year", NORM)
FIND_BASE = search("Stack-100M RoPE base", BASE)
FIND_STAR = search("STaR publication year", STAR)
LOST = search("lay the count", OTHER)


def cause(task: Task, *steps: Step, **fields) -> Failure | None:
    return classify_failure(episode(task, *steps, **fields), task)


def test_correct_episode_has_no_cause():
    assert cause(LOOKUP, FIND_LAYERS, answer("30")) is None
    assert cause(DOUBLE, FIND_YEAR, calc("2021*2", "4042"), answer("4042")) is None


class TestQueryAndEvidence:
    def test_query_that_does_not_name_the_fact(self):
        assert cause(LOOKUP, LOST, answer("640")) is Failure.BAD_QUERY

    def test_fact_never_asked_for(self):
        assert cause(LOOKUP, answer("640")) is Failure.BAD_QUERY
        assert cause(SUM, FIND_NORM, answer("2019")) is Failure.BAD_QUERY

    def test_calculating_before_asking_is_a_missing_query_not_a_wrong_copy(self):
        assert cause(SUM, FIND_NORM, calc("2019+512", "2531"), answer("2531")) is Failure.BAD_QUERY

    def test_named_fact_that_did_not_come_up(self):
        assert cause(LOOKUP, search("Stack-100M layer count", OTHER), answer("640")) is Failure.EVIDENCE_MISSED
        assert cause(LOOKUP, search("layer count of the stack-100m", "NoResults"), answer("unknown")) is (
            Failure.EVIDENCE_MISSED
        )

    def test_query_of_the_key_names_the_fact_too(self):
        task = replace(LOOKUP, queries=("depth of Stack-100M",))
        assert cause(task, search("Stack-100M depth", OTHER), answer("1")) is Failure.EVIDENCE_MISSED

    def test_evidence_is_the_fact_itself_not_a_neighbour_of_the_same_attribute(self):
        neighbour = "[1] Notes say that the layer count of R-001 is 1536, and so on."
        assert cause(LOOKUP, search("Stack-100M layer count", neighbour), answer("1536")) is Failure.EVIDENCE_MISSED

    def test_entity_whose_name_begins_with_another_is_no_evidence(self):
        longer = "[1] Notes say that the layer count of Stack-100M-long is 12, and so on."
        assert cause(LOOKUP, search("Stack-100M layer count", longer), answer("12")) is Failure.EVIDENCE_MISSED

    def test_bad_query_made_up_for_is_no_cause(self):
        assert cause(LOOKUP, LOST, FIND_LAYERS, answer("1536")) is Failure.WRONG_COPY

    def test_first_of_two_missing_facts_is_the_cause(self):
        missed = search("RMSNorm publication year", OTHER)
        assert cause(SUM, missed, LOST, answer("1")) is Failure.EVIDENCE_MISSED
        assert cause(SUM, LOST, missed, answer("1")) is Failure.BAD_QUERY


class TestCalculation:
    def test_wrong_form(self):
        assert cause(DOUBLE, FIND_YEAR, calc("2021+2", "2023"), answer("2023")) is Failure.WRONG_CALCULATION
        assert cause(SUM, FIND_NORM, FIND_BASE, calc("10000-2019", "7981"), answer("7981")) is (
            Failure.WRONG_CALCULATION
        )

    def test_in_the_head(self):
        assert cause(DOUBLE, FIND_YEAR, answer("4040")) is Failure.WRONG_CALCULATION

    def test_expression_that_gives_no_value(self):
        broken = calc("2021*", "CalcError: syntax")
        assert cause(DOUBLE, FIND_YEAR, broken, answer("4040")) is Failure.WRONG_CALCULATION

    def test_right_form_with_wrong_numbers_is_a_wrong_copy(self):
        assert cause(DOUBLE, FIND_YEAR, calc("2012*2", "4024"), answer("4024")) is Failure.WRONG_COPY
        assert cause(DOUBLE, FIND_YEAR, calc("(2012 + 2012)", "4024"), answer("4024")) is Failure.WRONG_COPY
        assert cause(SUM, FIND_NORM, FIND_BASE, calc("2019+1000", "3019"), answer("3019")) is Failure.WRONG_COPY

    def test_retry_that_gives_the_gold_value_makes_up_for_it(self):
        steps = FIND_YEAR, calc("2021+2", "2023"), calc("2021*2", "4042")
        assert cause(DOUBLE, *steps, answer("4043")) is Failure.WRONG_COPY

    def test_wrong_side_of_a_comparison(self):
        assert cause(COMPARE, FIND_STAR, FIND_BASE, answer("STaR")) is Failure.WRONG_CALCULATION
        assert cause(COMPARE, FIND_STAR, FIND_BASE, answer("10000")) is Failure.WRONG_COPY

    def test_difference_of_wrong_numbers_is_a_wrong_copy(self):
        steps = FIND_STAR, FIND_BASE
        assert cause(COMPARE, *steps, calc("2022 - 1000", "1022"), answer("STaR")) is Failure.WRONG_COPY
        assert cause(COMPARE, *steps, calc("2022-10000", "-7978"), answer("STaR")) is Failure.WRONG_CALCULATION
        retried = calc("2022-1000", "1022"), calc("10000-2022", "7978")
        assert cause(COMPARE, *steps, *retried, answer("STaR")) is Failure.WRONG_CALCULATION

    def test_wrong_answer_with_the_result_in_hand_is_a_wrong_copy(self):
        assert cause(DOUBLE, FIND_YEAR, calc("2021*2", "4042"), answer("404")) is Failure.WRONG_COPY


class TestBrokenTurns:
    def test_malformed_call(self):
        assert cause(LOOKUP, malformed(), answer("1")) is Failure.MALFORMED

    @pytest.mark.parametrize(
        "observation", ["ToolError: unknown tool 'serch'", "FormatError: emit a valid JSON tool call."]
    )
    def test_refused_call(self, observation):
        assert cause(LOOKUP, call("serch", observation, query="x"), answer("1")) is Failure.MALFORMED

    def test_malformed_call_made_up_for(self):
        assert cause(LOOKUP, malformed(), FIND_LAYERS, answer("1536")) is Failure.WRONG_COPY

    def test_final_turn_without_an_answer_or_cut_by_its_budget(self):
        assert cause(LOOKUP, FIND_LAYERS, answer(" ")) is Failure.MALFORMED
        assert cause(LOOKUP, FIND_LAYERS, replace(answer("3"), cut=True), stop=StopReason.LENGTH) is Failure.MALFORMED

    def test_repeated_call_while_something_is_missing(self):
        steps = FIND_NORM, repeat(FIND_NORM), repeat(FIND_NORM)
        assert cause(SUM, *steps, answer("2019")) is Failure.REPEATED_CALL
        assert cause(DOUBLE, FIND_YEAR, repeat(FIND_YEAR), answer("2021")) is Failure.REPEATED_CALL

    def test_repeated_call_with_the_answer_in_hand_is_no_cause(self):
        assert cause(LOOKUP, FIND_LAYERS, repeat(FIND_LAYERS), answer("1536")) is Failure.WRONG_COPY

    def test_repeat_of_a_query_that_missed_is_not_the_first_cause(self):
        missed = search("Stack-100M layer count", OTHER)
        assert cause(LOOKUP, missed, repeat(missed), answer("640")) is Failure.EVIDENCE_MISSED


class TestLimits:
    def test_step_limit_without_an_earlier_fault(self):
        steps = [search(f"RMSNorm publication year {word}", NORM) for word in "abcdef"]
        assert cause(SUM, *steps, forced(" 2019")) is Failure.STEP_LIMIT

    def test_step_limit_after_an_earlier_fault(self):
        assert (
            cause(LOOKUP, *[search(f"{word} count", OTHER) for word in "abcdef"], forced(" 640")) is Failure.BAD_QUERY
        )

    def test_unreadable_forced_turn_is_the_step_limit(self):
        last = Step(StepKind.MALFORMED, "Thought: I must answer now.\nAnswer: <|user|>", forced=True)
        steps = [search(f"Stack-100M layer count {word}", LAYERS) for word in "abcdef"]
        assert cause(LOOKUP, *steps, last, stop=StopReason.STEP_LIMIT) is Failure.STEP_LIMIT

    def test_context_full(self):
        assert cause(SUM, FIND_NORM, stop=StopReason.CONTEXT_FULL) is Failure.CONTEXT_FULL
        assert cause(SUM, stop=StopReason.CONTEXT_FULL) is Failure.CONTEXT_FULL
        assert cause(SUM, LOST, stop=StopReason.CONTEXT_FULL) is Failure.BAD_QUERY

    def test_turn_cut_by_a_full_context_is_not_malformed(self):
        assert cause(SUM, replace(malformed(), cut=True), stop=StopReason.CONTEXT_FULL) is Failure.CONTEXT_FULL
        assert cause(LOOKUP, replace(answer(""), cut=True), stop=StopReason.CONTEXT_FULL) is Failure.CONTEXT_FULL

    def test_error_is_the_cause_whatever_came_before(self):
        broken = episode(LOOKUP, LOST, stop=StopReason.ERROR, error="the engine died")
        assert classify_failure(broken, LOOKUP) is Failure.ERROR


class TestWithoutAKey:
    """One's own documents: the gold answer is known, the facts and queries are not."""

    QA = Task("How long is the warranty?", "24 months", task_id="qa-0", world="documents")
    FOUND = search("warranty", "[1] The warranty lasts 24 months.")

    @pytest.mark.parametrize("task", [QA, None])
    def test_rules_degrade(self, task):
        def degraded(*steps: Step) -> Failure | None:
            return classify_failure(episode(self.QA, *steps), task)

        assert degraded(self.FOUND, answer("24 weeks")) is Failure.WRONG_COPY
        assert degraded(search("guarantee", "[1] We guarantee quality."), answer("1")) is Failure.EVIDENCE_MISSED
        assert degraded(search("zzz", "NoResults"), answer("1")) is Failure.BAD_QUERY
        assert degraded(answer("1")) is Failure.BAD_QUERY
        assert degraded(malformed(), answer("1")) is Failure.MALFORMED
        assert degraded(self.FOUND, repeat(self.FOUND), answer("24")) is Failure.WRONG_COPY

    def test_queries_of_the_task_are_used_where_there_are_no_facts(self):
        task = replace(self.QA, queries=("warranty period",))
        assert cause(task, search("period", "[1] A period ends."), answer("1")) is Failure.BAD_QUERY
        assert cause(task, search("the warranty period", "[1] It is long."), answer("1")) is Failure.EVIDENCE_MISSED

    def test_calculation_with_numbers_of_its_own_is_a_wrong_copy(self):
        task = Task("How much do 3 boxes of 12 cost at 5 each?", "180", task_id="qa-1")
        assert cause(task, calc("3*12", "36"), answer("36")) is Failure.WRONG_CALCULATION
        assert cause(task, calc("3*13*5", "195"), answer("195")) is Failure.WRONG_COPY
        assert cause(task, calc("3*12*2", "72"), answer("72")) is Failure.WRONG_CALCULATION  # 2 is a constant

    def test_shape_of_the_record_says_that_a_calculation_is_due(self):
        assert classify_failure(episode(DOUBLE, FIND_YEAR, answer("4040"))) is Failure.WRONG_CALCULATION
        assert classify_failure(episode(COMPARE, LOST, answer("STaR"))) is Failure.EVIDENCE_MISSED
        assert classify_failure(episode(COMPARE, LOST, calc("3-2", "1"), answer("STaR"))) is Failure.EVIDENCE_MISSED


def test_counts_name_every_cause_and_add_up():
    episodes = [
        episode(LOOKUP, FIND_LAYERS, answer("30")),
        episode(LOOKUP, LOST, answer("1")),
        episode(LOOKUP, FIND_LAYERS, answer("1536")),
        episode(SUM, stop=StopReason.ERROR),
    ]
    counts = count_failures(episodes, TASKS)
    assert list(counts) == list(Failure)
    assert {failure for failure, count in counts.items() if count} == {
        Failure.BAD_QUERY,
        Failure.WRONG_COPY,
        Failure.ERROR,
    }
    assert sum(counts.values()) == 3


def test_every_cause_reads_as_words():
    assert Failure.WRONG_COPY.label == "wrong copy"
    assert all(failure.meaning.endswith(".") for failure in Failure)


texts = st.one_of(
    st.text(max_size=30), st.sampled_from([LAYERS, BASE, "NoResults", "CalcError: x", "ToolError: y", "4042"])
)
steps = st.builds(
    Step,
    kind=st.sampled_from(StepKind),
    text=texts,
    tool=st.sampled_from([None, "search", "calc", "read_file"]),
    arguments=st.one_of(
        st.none(), texts, st.sampled_from(['{"query": "Stack-100M layer count"}', '{"expr": "1+1"}', "[1]"])
    ),
    observation=st.one_of(st.none(), texts),
    answer=st.one_of(st.none(), texts),
    cut=st.booleans(),
    forced=st.booleans(),
)


@settings(deadline=None, max_examples=300)
@given(
    task=st.sampled_from([LOOKUP, DOUBLE, SUM, COMPARE, TestWithoutAKey.QA, replace(SUM, op="power")]),
    turns=st.lists(steps, max_size=6),
    stop=st.sampled_from(StopReason),
    keyed=st.booleans(),
)
def test_whatever_the_record_holds_a_failure_has_exactly_one_cause(task, turns, stop, keyed):
    record = replace(episode(task), steps=turns, stop_reason=stop, answer="no", correct=False)
    found = classify_failure(record, task if keyed else None)
    assert isinstance(found, Failure)
    assert (found is Failure.ERROR) == (stop is StopReason.ERROR)
    assert sum(count_failures([record], {task.task_id: task} if keyed else None).values()) == 1
    assert classify_failure(replace(record, correct=True), task) is None
