"""The grammar of a turn: what a policy can write, whatever its weights are."""

import json
import re

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from stacklm_hf.modeling.tokenization_stack import train_stack_tokenizer
from stacklm_hf.protocol import parse_turn, render_call
from stacklm_hf.protocol.encoding import encode_trusted
from stacklm_hf.protocol.grammar import TurnGrammar, call_regex
from stacklm_hf.tools import BM25Retriever
from stacklm_hf.tools.research import CalcTool, SearchTool

TOOLS = [(tool.spec.name, tool.spec.parameters) for tool in (SearchTool(BM25Retriever([])), CalcTool())]


@pytest.fixture(scope="module")
def tokenizer():
    return train_stack_tokenizer(["Thought: I need the layer count of Stack-100M. Answer: 30"] * 3, 400)


@pytest.fixture(scope="module")
def grammar(tokenizer):
    return TurnGrammar(tokenizer, TOOLS)


def accepts(grammar, tokenizer, text):
    """Whether every token of the text is allowed in its place, its closing end included."""
    matcher = grammar.matcher()
    return all(matcher.accept_token(token) for token in encode_trusted(tokenizer, text))


@pytest.mark.parametrize(
    "text",
    [
        "Thought: x\nAnswer: 4<|end|>",
        "<|end|>",
        'free text, {braces} and "quotes" é中😀<|end|>',
        "Thought: x\n" + render_call("search", {"query": "RMSNorm publication year", "k": 2}),
        render_call("calc", {"expr": "(1.5+2)*3-4/2"}),
    ],
)
def test_well_formed_turns_are_allowed(grammar, tokenizer, text):
    assert accepts(grammar, tokenizer, text)


@pytest.mark.parametrize(
    "text",
    [
        "Thought <|user|> more<|end|>",
        "<|tool_result|>4<|end|>",
        "<|tool_call|><|end|>",
        '<|tool_call|>{"tool": "browse", "args": {}}<|end|>',
        '<|tool_call|>{"tool": "calc", "args": {"expr": "x"}}<|end|>',
        '<|tool_call|>{"tool": "calc", "args": {"expr": ""}}<|end|>',
        '<|tool_call|>{"tool": "calc", "args": {"expr": "' + "1" * 41 + '"}}<|end|>',
        '<|tool_call|>{"tool": "search", "args": {"query": "a"}}<|end|>',
        '<|tool_call|>{"tool": "search", "args": {"query": "a", "k": 0}}<|end|>',
        '<|tool_call|>{"tool": "search", "args": {"k": 2, "query": "a"}}<|end|>',
        '<|tool_call|>{"tool":"calc","args":{"expr":"1"}}<|end|>',
        '<|tool_call|>{"tool": "calc", "args": {"expr": "1"}} and then<|end|>',
        '<|tool_call|>{"tool": "calc", "args": {"expr": "1"}}<|tool_call|>',
    ],
)
def test_malformed_turns_are_not(grammar, tokenizer, text):
    assert not accepts(grammar, tokenizer, text)


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_random_policy_cannot_write_a_malformed_turn(grammar, tokenizer, random):
    matcher, ids = grammar.matcher(), []
    bitmask = xgrammar.allocate_token_bitmask(1, grammar.vocab_size)
    call_id = tokenizer.convert_tokens_to_ids("<|tool_call|>")
    while not matcher.is_terminated():
        matcher.fill_next_token_bitmask(bitmask)
        allowed = [token for token in range(grammar.vocab_size) if bitmask[0, token // 32] >> (token % 32) & 1]
        choice = call_id if call_id in allowed and random.random() < 0.2 else random.choice(allowed)
        assert matcher.accept_token(choice)
        ids.append(choice)
    assert parse_turn(tokenizer.decode(ids)).kind in {"call", "answer"}


def test_the_forced_last_turn_can_only_answer(tokenizer):
    grammar = TurnGrammar(tokenizer, ())
    assert accepts(grammar, tokenizer, " 42<|end|>")
    assert not accepts(grammar, tokenizer, render_call("calc", {"expr": "1"}))


def test_no_padding_id_beyond_the_tokenizer_is_ever_allowed(tokenizer):
    grammar = TurnGrammar(tokenizer, TOOLS, vocab_size=len(tokenizer) + 64)
    bitmask = xgrammar.allocate_token_bitmask(1, grammar.vocab_size)
    grammar.matcher().fill_next_token_bitmask(bitmask)
    allowed = [token for token in range(grammar.vocab_size) if bitmask[0, token // 32] >> (token % 32) & 1]
    assert max(allowed) < len(tokenizer)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ['"a"', '"\\n\\u00e9"', '""'], ['"a', '"\n"', "a"]),
        ({"type": "integer"}, ["0", "-12"], ["01", "1.5", '"1"']),
        ({"type": "integer", "minimum": 1, "maximum": 9}, ["1", "9"], ["0", "10"]),
        ({"type": "integer", "minimum": 8, "maximum": 11}, ["8", "11"], ["7", "12"]),
        ({"type": "number"}, ["1.5", "-2e3"], ["1.", "nan"]),
        ({"type": "boolean"}, ["true"], ["True"]),
        ({"enum": ["a", 3]}, ['"a"', "3"], ["a", "4"]),
        ({"type": ["string", "null"]}, ['"a"', "null"], ["none"]),
        ({"anyOf": [{"type": "boolean"}, {"type": "integer"}]}, ["true", "4"], ['"4"']),
        ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1, 2]"], ["[1,2]", "[,]"]),
        ({"type": "object", "properties": {"a": {"type": "null"}}}, ['{"a": null}'], ["{}"]),
    ],
)
def test_each_kind_of_argument_has_its_grammar(schema, good, bad):
    pattern = call_regex("t", {"type": "object", "properties": {"x": schema}})
    for value in good:
        text = '{"tool": "t", "args": {"x": ' + value + "}}"
        assert re.fullmatch(pattern, text)
        json.loads(text)
    for value in bad:
        assert not re.fullmatch(pattern, '{"tool": "t", "args": {"x": ' + value + "}}")


def test_optional_arguments_may_be_left_out_in_any_combination():
    kind = {"type": "integer", "minimum": 1, "maximum": 1}
    for required, count in (((), 8), (("b",), 4), (("a",), 4), (("a", "b", "c"), 1)):
        schema = {"type": "object", "properties": {"a": kind, "b": kind, "c": kind}, "required": list(required)}
        pattern = call_regex("t", schema)
        accepted = 0
        for bits in range(8):
            args = {name: 1 for bit, name in enumerate("abc") if bits >> bit & 1}
            accepted += bool(re.fullmatch(pattern, json.dumps({"tool": "t", "args": args})))
        assert accepted == count


def test_a_schema_that_cannot_be_constrained_is_named():
    with pytest.raises(ValueError, match=r"t\.x: an object without 'properties'"):
        call_regex("t", {"type": "object", "properties": {"x": {"type": "object"}}})
    with pytest.raises(ValueError, match=r"t\.x: a schema of type None"):
        call_regex("t", {"type": "object", "properties": {"x": {}}})


def test_a_tokenizer_without_the_tokens_is_refused():
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(unk_token="?", vocab={"?": 0}, merges=[])))
    with pytest.raises(ValueError, match="add_agent_tokens"):
        TurnGrammar(bare, TOOLS)
