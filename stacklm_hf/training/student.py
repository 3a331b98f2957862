"""A student from random weights: its tokenizer and its model.

Contract: the tokenizer is trained on transcripts of training tasks only; the same arguments give the same student.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stacklm_hf.modeling.configuration_stack import StackConfig
from stacklm_hf.modeling.modeling_stack import StackForCausalLM
from stacklm_hf.modeling.tokenization_stack import StackTokenizerFast, train_stack_tokenizer
from stacklm_hf.protocol.tokens import SPECIAL_TOKENS, TOOL_CALL
from stacklm_hf.rollout.episode import EpisodeSettings, run_episodes
from stacklm_hf.rollout.scripted import ScriptedTeacher
from stacklm_hf.rollout.trajectory import Trajectory
from stacklm_hf.worlds.base import Environment, Task

# Single digits, capitalised names as pieces of their own, and merges over everything between them: phrases that recur
# become one token. A transcript then has less than half the tokens of word-level pieces, which is what lets a student
# learn in minutes on a CPU; numbers and most names are the same tokens wherever they stand, so they can be copied.
PHRASE_PATTERN = r"\p{N}|[A-Z]\p{L}*-?|[^\p{N}A-Z]+"
_TRANSCRIPTS = 800


def build_tokenizer(
    path: str | os.PathLike[str],
    tasks: Sequence[Task],
    environment: Environment,
    vocab_size: int,
    pattern: str = PHRASE_PATTERN,
) -> StackTokenizerFast:
    """Trains a tokenizer on transcripts of the scripted teacher, and saves it.

    The transcripts are made with a vocabulary of bytes alone, since no tokenizer is there yet.

    Args:
        path: Folder to write.
        tasks: Training tasks with a key; the first few hundred are played.
        environment: Runs the tools.
        vocab_size: Tokens, the nine control tokens included.
        pattern: How text is split before merges are learned.
    """
    bytes_only = train_stack_tokenizer([], 256 + len(SPECIAL_TOKENS))
    settings = EpisodeSettings(max_new_tokens=2000)
    transcripts = run_episodes(
        ScriptedTeacher(bytes_only), tasks[:_TRANSCRIPTS], environment, settings, progress="transcripts"
    )
    texts = (text for trajectory in transcripts for text in _texts(trajectory))
    tokenizer = train_stack_tokenizer(texts, vocab_size, pattern=pattern)
    tokenizer.save_pretrained(path)
    return tokenizer


def _texts(trajectory: Trajectory) -> list[str]:
    """The text between the markers."""
    turns = [part for step in trajectory.steps for part in (*step.text.split(TOOL_CALL), step.observation or "")]
    return [trajectory.system, trajectory.question, *turns]


def build_student(tokenizer: PreTrainedTokenizerBase, preset: str, seed: int, **overrides: Any) -> StackForCausalLM:
    """A Stack model of a named size from random weights, fitting a tokenizer.

    Args:
        tokenizer: A Stack tokenizer.
        preset: A name of `stacklm_hf.modeling.configuration_stack.PRESETS`.
        seed: Seed of the weights.
        overrides: Arguments of the configuration.
    """
    config = StackConfig.from_preset(preset, vocab_size=len(tokenizer), **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return StackForCausalLM(config)
