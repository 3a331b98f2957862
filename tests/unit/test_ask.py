"""What a person sees while an episode runs."""

import asyncio
import io

import pytest

from stacklm_hf.ask import TurnPrinter, ask, printable
from stacklm_hf.modeling.tokenization_stack import train_stack_tokenizer
from stacklm_hf.protocol import encode_trusted
from stacklm_hf.rollout import TurnOutput
from stacklm_hf.worlds.research import ResearchEnvironment, build_corpus


@pytest.fixture(scope="module")
def tokenizer():
    return train_stack_tokenizer(["Thought: I need it. Answer: 4"] * 2, 300)


class Canned:
    name, max_context, sampling = "canned", 4096, {}

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns = tokenizer, iter(turns)

    async def turn(self, request):
        ids = encode_trusted(self.tokenizer, next(self.turns))
        for token_id in ids:
            request.on_token(token_id)
        return TurnOutput(ids, [0.0] * len(ids), [False] * len(ids))

    def release(self, episode_id):
        pass


def shown(tokenizer, turns, question="q", color=False):
    out = io.StringIO()
    asyncio.run(ask(question, Canned(tokenizer, turns), ResearchEnvironment(build_corpus()), out=out, color=color))
    return out.getvalue()


CALL = 'Thought: I compute.\n<|tool_call|>{"tool": "calc", "args": {"expr": "21*2"}}<|end|>'


def test_thought_call_observation_and_answer_in_order(tokenizer):
    text = shown(tokenizer, [CALL, "Thought: Done.\nAnswer: 42<|end|>"])
    assert text.splitlines() == [
        "Thought: I compute.",
        'Call: {"tool": "calc", "args": {"expr": "21*2"}}',
        "Observation: 42",
        "Thought: Done.",
        "Answer: 42",
        "=> 42",
    ]


def test_an_answer_that_no_observation_holds_is_marked(tokenizer):
    assert "do not trust it" in shown(tokenizer, ["Answer: 99<|end|>"]).splitlines()[-1]


def test_model_output_cannot_drive_the_terminal(tokenizer):
    text = shown(tokenizer, ["Answer: \x1b[2J\x07 é中<|end|>"])
    assert "\x1b" not in text
    assert "\\x1b[2J\\x07 é中" in text


def test_characters_of_several_tokens_come_whole(tokenizer):
    out = io.StringIO()
    printer = TurnPrinter(tokenizer, out)
    for token_id in encode_trusted(tokenizer, "日本 😀"):
        printer.on_token(token_id)
    assert out.getvalue() == "日本 😀"
    assert printable("a\tb") == "a\\tb"
