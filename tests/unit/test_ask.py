"""What a person sees while an episode runs."""

import asyncio
import io
import shutil

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stacklm_hf.ask import TurnPrinter, ask, load_policy, printable
from stacklm_hf.modeling.tokenization_stack import train_stack_tokenizer
from stacklm_hf.protocol import SPECIAL_TOKENS, encode_trusted
from stacklm_hf.rollout import TurnOutput
from stacklm_hf.training.student import build_student
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


def test_blanks_between_words_stay_where_a_tokenizer_drops_the_first(tmp_path):
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(["▁two", "▁words", "[UNK]"])}, "[UNK]")
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    out = io.StringIO()
    printer = TurnPrinter(PreTrainedTokenizerFast(tokenizer_object=backend), out)
    for token_id in (0, 1):
        printer.on_token(token_id)
    assert out.getvalue() == "two words"


def test_a_character_that_never_becomes_whole_is_shown_and_holds_nothing_up(tokenizer):
    half = encode_trusted(tokenizer, "😀")[:2]
    out = io.StringIO()
    printer = TurnPrinter(tokenizer, out)
    for token_id in [*half, *encode_trusted(tokenizer, "<|end|>Answer: 4")]:
        printer.on_token(token_id)
    assert out.getvalue() == "\ufffdAnswer: 4"


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    tokenizer.save_pretrained(path)
    build_student(tokenizer, "stack-demo", 0, num_hidden_layers=1).save_pretrained(path)
    return path


BROKEN = {
    "model.safetensors": "no tensors",
    "tokenizer.json": "{}",
    "config.json": '{"model_type": "stack", "num_hidden_layers": "x"}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_one_clear_line(checkpoint, tmp_path, name):
    path = shutil.copytree(checkpoint, tmp_path / "broken")
    (path / name).write_text(BROKEN[name])
    with pytest.raises(ValueError, match=r"is no checkpoint that can be loaded: .+"):
        load_policy(str(path), ResearchEnvironment(build_corpus()))


def test_a_model_that_was_trained_on_has_another_name(checkpoint, tokenizer):
    environment = ResearchEnvironment(build_corpus())
    before = load_policy(str(checkpoint), environment)
    assert before.name == load_policy(str(checkpoint), environment).name
    with torch.no_grad():
        for parameter in before.model.parameters():
            parameter.add_(1e-3)
    before.model.save_pretrained(checkpoint)
    assert before.name != load_policy(str(checkpoint), environment).name
