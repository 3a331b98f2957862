"""The record of an episode, the one episode loop, and the policies that run in it."""

from stacklm_hf.rollout.episode import EpisodeSettings, run_episode, run_episodes, run_episodes_async
from stacklm_hf.rollout.policy import Policy, PolicyError, TurnOutput, TurnRequest
from stacklm_hf.rollout.scripted import ScriptedTeacher
from stacklm_hf.rollout.trajectory import Step, StepKind, StopReason, Trajectory

__all__ = [
    "EpisodeSettings",
    "Policy",
    "PolicyError",
    "ScriptedTeacher",
    "Step",
    "StepKind",
    "StopReason",
    "Trajectory",
    "TurnOutput",
    "TurnRequest",
    "run_episode",
    "run_episodes",
    "run_episodes_async",
]
