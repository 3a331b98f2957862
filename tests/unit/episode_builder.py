"""Episodes written by hand, with their tokens, for the tests of the evaluation: one token per character."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from stacklm_hf.protocol.tokens import ASSISTANT, END, SPECIAL_TOKENS, SYSTEM, TOOL_RESULT, USER
from stacklm_hf.protocol.wire import FORCED_BODY, FORMAT_ERROR, REPEATED_CALL, parse_turn, render_call
from stacklm_hf.rollout.trajectory import Step, StepKind, StopReason, Trajectory
from stacklm_hf.verify import is_correct, is_grounded
from stacklm_hf.worlds.base import Task

SYSTEM_PROMPT = "You are a narrow research assistant. Tools: search(query,k), calc(expr)."


class CharTokenizer:
    """Ids are code points; the control tokens lie behind the last one."""

    all_special_ids = tuple(range(0x110000, 0x110000 + len(SPECIAL_TOKENS)))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not skip_special_tokens
        assert not clean_up_tokenization_spaces
        return "".join(chr(i) if i < 0x110000 else SPECIAL_TOKENS[i - 0x110000] for i in token_ids)


TOKENIZER = CharTokenizer()


def control(token: str) -> int:
    return 0x110000 + SPECIAL_TOKENS.index(token)


LOOKUP = Task(
    "What is the layer count of Stack-100M?",
    "30",
    "lookup",
    ("Stack-100M layer count",),
    (("Stack-100M", "layer count"),),
    task_id="lookup-0",
    split="heldout",
)
DOUBLE = Task(
    "What is the publication year of RoFormer, multiplied by 2?",
    "4042",
    "double",
    ("RoFormer publication year",),
    (("RoFormer", "publication year"),),
    "double",
    task_id="double-0",
    split="heldout",
)
SUM = Task(
    "What do you get if you add the publication year of RMSNorm to the RoPE base of Stack-100M?",
    "12019",
    "sum",
    ("RMSNorm publication year", "Stack-100M RoPE base"),
    (("RMSNorm", "publication year"), ("Stack-100M", "RoPE base")),
    "sum",
    task_id="sum-0",
    split="heldout",
)
COMPARE = Task(
    "Which is larger, the publication year of STaR or the RoPE base of Stack-100M?",
    "Stack-100M",
    "compare",
    ("STaR publication year", "Stack-100M RoPE base"),
    (("STaR", "publication year"), ("Stack-100M", "RoPE base")),
    "compare",
    task_id="compare-0",
    split="heldout",
)
TASKS = {task.task_id: task for task in (LOOKUP, DOUBLE, SUM, COMPARE)}

LAYERS = "[1] For reference, the layer count of Stack-100M is 30. [2] Elsewhere, the layer count of R-001 is 1536."
YEAR = "[1] For reference, the publication year of RoFormer is 2021, as noted. [2] Some other passage."
NORM = "[1] Notes say that the publication year of RMSNorm is 2019, and so on."
BASE = "[1] Notes say that the RoPE base of Stack-100M is 10000, and so on."
STAR = "[1] Notes say that the publication year of STaR is 2022, and so on."
OTHER = "[1] Notes say that the head dimension of ablation run R-004 is 640, and so on."


def call(tool: str, observation: str | None, thought: str = "Thought: I need it.", **arguments: Any) -> Step:
    text = f"{thought}\n{render_call(tool, arguments).removesuffix(END)}"
    return Step(StepKind.CALL, text, thought, tool, json.dumps(arguments, ensure_ascii=False), observation)


def search(query: str, observation: str | None) -> Step:
    return call("search", observation, query=query, k=2)


def calc(expr: str, observation: str) -> Step:
    return call("calc", observation, expr=expr)


def malformed(text: str = 'Thought: x\n<|tool_call|>{"tool": "calc"') -> Step:
    return Step(StepKind.MALFORMED, text, observation=FORMAT_ERROR)


def repeat(step: Step) -> Step:
    return replace(step, observation=REPEATED_CALL)


def answer(text: str, thought: str = "I have everything I need.") -> Step:
    return Step(StepKind.ANSWER, f"Thought: {thought}\nAnswer: {text}", thought, answer=text)


def forced(text: str) -> Step:
    turn = parse_turn(FORCED_BODY + text)
    return Step(StepKind.ANSWER, FORCED_BODY + text, turn.thought, answer=turn.answer, forced=True)


def episode(task: Task, *steps: Step, stop: StopReason | None = None, sample: int = 0, **fields: Any) -> Trajectory:
    """An episode of these turns, with its tokens; scored as the episode loop does."""
    if stop is None:
        stop = StopReason.STEP_LIMIT if steps and steps[-1].forced else StopReason.ANSWERED
    trajectory = Trajectory(
        f"{task.task_id}/seed0/{sample}",
        task.task_id,
        task.world,
        task.kind,
        task.question,
        task.gold,
        steps=list(steps),
        stop_reason=stop,
        split=task.split,
        system=SYSTEM_PROMPT,
        policy="by hand",
    )
    _write_tokens(trajectory)
    trajectory.answer = next((step.answer for step in reversed(steps) if step.kind is StepKind.ANSWER), None)
    trajectory.correct = is_correct(trajectory.answer, task.gold)
    trajectory.grounded = is_grounded(trajectory.answer, trajectory.observations)
    trajectory = replace(trajectory, **fields)
    trajectory.check()
    return trajectory


def _write_tokens(trajectory: Trajectory) -> None:
    def write(*parts: str, own: bool = False) -> None:
        for part in parts:
            ids = [control(part)] if part in SPECIAL_TOKENS else [ord(char) for char in part]
            trajectory.token_ids += ids
            trajectory.sampled += [own] * len(ids)
            trajectory.logprobs += [-0.5 if own else None] * len(ids)
            # The grammar leaves one choice for the frame of a call, as in `{"tool": "`.
            trajectory.forced += [own and token_id in map(ord, '{":') for token_id in ids]

    write(SYSTEM, trajectory.system, END, USER, trajectory.question, END)
    for step in trajectory.steps:
        write(ASSISTANT)
        text = step.text
        if step.forced:
            write(FORCED_BODY)
            text = text.removeprefix(FORCED_BODY)
        body, marker, rest = text.partition("<|tool_call|>")
        write(body, *([marker] if marker else []), rest, END, own=True)
        if step.observation is not None:
            write(TOOL_RESULT, step.observation, END)
