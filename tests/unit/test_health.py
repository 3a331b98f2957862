"""The health of a GRPO run: counts of a batch, groups that teach nothing, the gap between sampler and trainer."""

import math

import pytest
import torch
from episode_builder import COMPARE, LAYERS, LOOKUP, SUM, answer, calc, episode, forced, malformed, repeat, search
from hypothesis import given
from hypothesis import strategies as st

from stacklm_hf.rollout.trajectory import StopReason
from stacklm_hf.training.health import LogprobGap, degenerate_groups, episode_metrics, is_truncated, num_trained

QUERY = "Stack-100M layer count"
GOOD = episode(LOOKUP, search(QUERY, LAYERS), answer("30"))
WRONG = episode(SUM, calc("1+1", "2"), repeat(calc("1+1", "2")), malformed(), answer("2"))
FORCED = episode(COMPARE, malformed(), forced(" Stack-100M"))
FULL = episode(LOOKUP, search(QUERY, LAYERS), stop=StopReason.CONTEXT_FULL)


class TestEpisodeMetrics:
    def test_counts_are_per_episode_and_accuracy_also_by_shape(self):
        metrics = episode_metrics([GOOD, GOOD, WRONG, FORCED])
        agent = {name: value for name, value in metrics.items() if name.startswith("agent/")}
        assert agent == {
            "agent/accuracy": 0.75,
            "agent/accuracy_lookup": 1.0,
            "agent/accuracy_sum": 0.0,
            "agent/accuracy_compare": 1.0,
            "agent/steps": (2 + 2 + 4 + 2) / 4,
            "agent/calls": (1 + 1 + 2 + 0) / 4,
            "agent/malformed_calls": (1 + 1) / 4,
            "agent/repeated_calls": 1 / 4,
            "agent/forced_answers": 1 / 4,
            "agent/truncated": 0.0,
        }

    def test_token_shares_are_of_all_tokens_and_forced_ones_are_not_trained_on(self):
        metrics = episode_metrics([GOOD, FORCED])
        real = len(GOOD.token_ids) + len(FORCED.token_ids)
        assert metrics["tokens/own_share"] == (GOOD.num_sampled + FORCED.num_sampled) / real
        assert metrics["tokens/trained_share"] == (num_trained(GOOD) + num_trained(FORCED)) / real
        assert 0 < metrics["tokens/trained_share"] < metrics["tokens/own_share"] < 1


def test_truncated_is_what_a_budget_ended_and_no_answered_or_forced_turn():
    cut = episode(LOOKUP, answer("3"), stop=StopReason.LENGTH)
    cut.steps[-1].cut = True
    assert [is_truncated(one) for one in (GOOD, WRONG, FORCED, FULL, cut)] == [False, False, False, True, True]


class TestDegenerateGroups:
    def test_equal_rewards_are_found_whatever_their_float32_mean_is(self):
        rewards = torch.tensor([0.7] * 8)
        assert rewards[:7].mean() != rewards[0]  # what a comparison with the mean would trip over
        assert degenerate_groups(rewards, 8) == [True]
        assert degenerate_groups([0.7] * 7 + [0.70001], 8) == [False]

    def test_a_group_with_one_scored_sample_teaches_nothing(self):
        nan = math.nan
        assert degenerate_groups([nan, 1.0, nan, nan, 0.0, 1.0], 2) == [True, True, False]

    @given(st.lists(st.sampled_from([0.0, 0.1, 0.7, 1 / 3]), min_size=4, max_size=4))
    def test_the_order_in_a_group_does_not_matter(self, rewards):
        assert degenerate_groups(rewards, 4) == degenerate_groups(rewards[::-1], 4) == [len(set(rewards)) == 1]


class TestLogprobGap:
    def test_mean_over_tokens_and_maximum_over_all(self):
        gap = LogprobGap()
        gap.add(0.3, 3, 0.2)
        gap.add(0.5, 1, 0.5)
        mean, largest = gap.pop().values()
        assert mean == pytest.approx(0.2)
        assert largest == 0.5

    def test_it_starts_anew_and_says_nothing_of_no_token(self):
        gap = LogprobGap()
        gap.add(0.5, 1, 0.5)
        gap.pop()
        gap.add(0.0, 0, 0.0)
        assert gap.pop() == {}
