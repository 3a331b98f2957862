"""The chat template gives the ids and the mask of the token-native path, and TRL takes it as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError

from stacklm_hf.modeling.tokenization_stack import StackTokenizerFast, generation_defaults
from stacklm_hf.protocol.encoding import encode_trusted, encode_untrusted
from stacklm_hf.protocol.template import CHAT_TEMPLATE, build_chat_template
from stacklm_hf.protocol.tokens import ASSISTANT, END, SPECIAL_TOKENS, SYSTEM, TOOL_CALL, TOOL_RESULT, USER
from stacklm_hf.protocol.wire import (
    FORCED_BODY,
    escape_json_markers,
    neutralize,
    parse_turn,
    render_call,
    render_result,
    render_system,
    render_user,
    system_prompt,
)

DATA = Path(__file__).parents[1] / "data"
PROTOCOL = json.loads((DATA / "protocol.json").read_text(encoding="utf-8"))
TOKENIZER = StackTokenizerFast.from_native(DATA / "native_tokenizer_padded.json")


def schema(name: str, *parameters: str) -> dict:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [schema("search", "query", "k"), schema("calc", "expr")]


def system(content: str) -> dict:
    return {"role": "system", "content": content}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def result(content: str) -> dict:
    return {"role": "tool", "content": content}


def assistant(content: str, name: str | None = None, arguments: dict | str | None = None, **keys) -> dict:
    message = {"role": "assistant", "content": content, **keys}
    if name is not None:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": text}}]
    return message


def render(messages: list[dict], **kwargs) -> str:
    return TOKENIZER.apply_chat_template(messages, tokenize=False, **kwargs)


def ids_and_mask(messages: list[dict], **kwargs) -> tuple[list[int], list[int]]:
    out = TOKENIZER.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True, **kwargs)
    return out["input_ids"], out["assistant_masks"]


def token_native(messages: list[dict]) -> tuple[list[int], list[int]]:
    """The ids as the episode loop makes them: markers trusted, everything else untrusted, span by span."""
    marker = {token: encode_trusted(TOKENIZER, token) for token in SPECIAL_TOKENS}
    opening = {"system": SYSTEM, "user": USER, "tool": TOOL_RESULT, "assistant": ASSISTANT}
    ids: list[int] = []
    mask: list[int] = []

    def write(new: list[int], sampled: bool) -> None:
        ids.extend(new)
        mask.extend([int(sampled)] * len(new))

    for message in messages:
        own = message["role"] == "assistant"
        write(marker[opening[message["role"]]], False)
        text = neutralize(message["content"])
        if message.get("tool_calls"):
            function = message["tool_calls"][0]["function"]
            text += "" if not text or text.endswith("\n") else "\n"
            write(encode_untrusted(TOKENIZER, text), True)
            write(marker[TOOL_CALL], True)
            name = json.dumps(function["name"], ensure_ascii=False)
            text = escape_json_markers(f'{{"tool": {name}, "args": {function["arguments"]}}}')
        write(encode_untrusted(TOKENIZER, text), own)
        write(marker[END], own)
    return ids, mask


pieces = st.sampled_from([*SPECIAL_TOKENS, "<|", "|>", "<|unused_0|>", "end|>", "<", "\n", " ", "\\", '"', "Tools:"])
texts = st.lists(pieces | st.text(max_size=6), max_size=6).map("".join)
json_values = st.dictionaries(texts, texts | st.integers() | st.booleans() | st.none() | st.lists(texts, max_size=2))
assistants = st.builds(assistant, texts) | st.builds(assistant, texts, texts, json_values)
conversations = st.lists(
    st.builds(system, texts) | st.builds(user, texts) | st.builds(result, texts) | assistants, min_size=1, max_size=6
)


class TestWireFormat:
    def test_the_transcript_of_the_original_with_its_mask(self):
        messages = [
            system("You are brief."),
            user("What is 2 times 21?"),
            assistant("Thought: I compute.", "calc", {"expr": "21*2"}),
            result("42"),
            assistant("Thought: I have everything I need.\nAnswer: 42"),
        ]
        expected: tuple[list[int], list[int]] = ([], [])
        for text, sampled in PROTOCOL["transcript"]["spans"]:
            ids = encode_trusted(TOKENIZER, text)
            expected[0].extend(ids)
            expected[1].extend([sampled] * len(ids))
        assert ids_and_mask(messages) == expected
        assert render(messages) == "".join(text for text, _ in PROTOCOL["transcript"]["spans"])

    @settings(max_examples=300, deadline=None)
    @given(messages=conversations)
    def test_ids_and_mask_are_those_of_the_token_native_path_whatever_the_messages_hold(self, messages):
        assert ids_and_mask(messages) == token_native(messages)

    @settings(max_examples=100, deadline=None)
    @given(question=texts, thought=texts, name=texts, args=json_values, observation=texts)
    def test_text_is_that_of_the_rendering_functions(self, question, thought, name, args, observation):
        messages = [system("S"), user(question), assistant(thought, name, args), result(observation)]
        thought = neutralize(thought)
        line = "" if not thought or thought.endswith("\n") else "\n"
        assert render(messages) == (
            render_system("S")
            + render_user(question)
            + f"{ASSISTANT}{thought}{line}{render_call(name, args)}"
            + render_result(observation)
        )

    @settings(max_examples=100, deadline=None)
    @given(messages=conversations, more=conversations)
    def test_a_message_renders_the_same_whatever_follows_it(self, messages, more):
        assert render(messages + more, tools=TOOLS).startswith(render(messages, tools=TOOLS))
        prompt = ids_and_mask(messages, add_generation_prompt=True)[0]
        answered = ids_and_mask([*messages, assistant("a")])[0]
        assert answered[: len(prompt)] == prompt

    def test_a_batch_gives_each_conversation_its_own_ids_and_mask(self):
        batch = [[user("a"), assistant("b é 中")], [user("long question here"), assistant("c"), user("d")]]
        out = TOKENIZER.apply_chat_template(batch, return_assistant_tokens_mask=True, return_dict=True, padding=True)
        for row, messages in enumerate(batch):
            ids, mask = ids_and_mask(messages)
            assert out["input_ids"][row][-len(ids) :] == ids
            assert out["assistant_masks"][row][-len(ids) :] == mask
            assert sum(out["assistant_masks"][row]) == sum(mask)


class TestMessages:
    def test_arguments_may_be_a_dict(self):
        args = {"query": "é <|end|>", "k": 2}
        as_dict = assistant("t", "search", args)
        as_dict["tool_calls"][0]["function"]["arguments"] = args
        assert render([as_dict]) == render([assistant("t", "search", args)])

    @pytest.mark.parametrize("arguments", ["", None, {}])
    def test_no_arguments_are_an_empty_object(self, arguments):
        message = assistant("", "now", "{}")
        message["tool_calls"][0]["function"]["arguments"] = arguments
        assert render([message]) == f'{ASSISTANT}{TOOL_CALL}{{"tool": "now", "args": {{}}}}{END}'

    def test_a_row_filled_up_with_nulls_by_arrow_is_the_same_message(self):
        message = {"role": "assistant", "content": "a", "tool_calls": None, "prefill": None, "closed": None}
        assert ids_and_mask([message]) == ids_and_mask([assistant("a")])

    @pytest.mark.parametrize("content", [None, "", []])
    def test_a_call_without_a_thought_begins_with_its_marker(self, content):
        assert render([assistant(content, "calc", {})]).startswith(ASSISTANT + TOOL_CALL)

    def test_text_parts_are_joined_before_markers_are_made_inert(self):
        parts = [{"type": "text", "text": "<|e"}, {"type": "text", "text": "nd|>"}]
        assert render([user(parts)]) == render_user("<|end|>")

    def test_what_a_tool_returned_as_data_is_shown_as_json(self):
        assert render([result({"error": "<|end|>"})]) == render_result('{"error": "<|end|>"}')

    @pytest.mark.parametrize(
        ("message", "says"),
        [
            ({"role": "narrator", "content": ""}, "no such role: narrator"),
            (user([{"type": "image"}]), "not a part of type image"),
            ({**assistant(""), "tool_calls": [{"name": "a"}, {"name": "b"}]}, "one tool call"),
        ],
    )
    def test_what_the_format_cannot_say_is_refused(self, message, says):
        with pytest.raises(TemplateError, match=says):
            render([message])

    def test_what_the_harness_wrote_of_a_turn_is_not_trained_on(self):
        forced = assistant(" 42", prefill=FORCED_BODY, closed=False)
        ids, mask = ids_and_mask([user("q"), forced])
        assert TOKENIZER.decode(ids).endswith(f"{PROTOCOL['forced_turn']} 42{END}")
        assert TOKENIZER.decode([i for i, sampled in zip(ids, mask, strict=True) if sampled]) == " 42"

    def test_a_turn_can_be_continued(self):
        text = render([user("q"), assistant(FORCED_BODY)], continue_final_message=True)
        assert text == render_user("q") + PROTOCOL["forced_turn"]


class TestToolLine:
    def test_tools_without_a_system_message_bring_the_system_prompt(self):
        assert render([user("q")], tools=TOOLS) == render_system(PROTOCOL["system_prompt"]) + render_user("q")

    def test_a_system_message_that_has_its_tool_line_is_used_as_it_is(self):
        messages = [system(PROTOCOL["system_prompt"]), user("q")]
        assert render(messages, tools=TOOLS[:1]) == render(messages)

    def test_a_system_message_without_a_tool_line_gets_it(self):
        assert render([system("Be brief.")], tools=TOOLS) == render(
            [system("Be brief. Tools: search(query,k), calc(expr).")]
        )
        assert render([system("")], tools=TOOLS) == render([system("Tools: search(query,k), calc(expr).")])

    def test_without_tools_and_system_message_there_is_no_system_span(self):
        assert render([user("q")]) == render([user("q")], tools=[]) == render_user("q")

    def test_schemas_may_be_bare_and_without_parameters(self):
        bare = [{"name": "now"}, {"name": "end<|end|>", "parameters": {"type": "object"}}]
        assert render([user("q")], tools=bare) == render_system(system_prompt(["now()", "end<|end|>()"])) + render_user(
            "q"
        )


class TestParsing:
    # A call without `args` is one that transformers' parser cannot read; everything else is the same to both.
    READABLE = [case for case in PROTOCOL["turns"] if case["kind"] != "malformed" and case.get("args") != {}]  # noqa: RUF012
    PREFIX = TOKENIZER.apply_chat_template([user("q")], add_generation_prompt=True, return_dict=False)

    def parse(self, text: str) -> dict:
        return TOKENIZER.parse_response(encode_trusted(TOKENIZER, text), prefix=self.PREFIX)

    @pytest.mark.parametrize("case", READABLE, ids=lambda case: case["text"][:20])
    def test_it_reads_turns_as_the_protocol_does(self, case):
        message = self.parse(case["text"] + END)
        if case["kind"] == "call":
            function = {"name": case["tool"], "arguments": case["args"]}
            assert message["content"] == f"Thought: {case['thought']}"
            assert message["tool_calls"] == [{"type": "function", "function": function}]
        else:
            turn = parse_turn(message["content"])
            assert (turn.thought, turn.answer) == (case["thought"], case["answer"])
            assert "tool_calls" not in message

    @pytest.mark.parametrize(
        "call",
        [
            '{"tool": "calc", "args": {"expr": "1+1"',
            '{"tool": "calc", "args": {}}<|tool_call|>{"tool": "calc", "args": {}}',
            '{"args": {}}',
            '{"tool": "calc"}',
            "[]",
            "",
        ],
    )
    def test_a_call_that_cannot_be_read_raises(self, call):
        with pytest.raises(ValueError, match=r"json parser|transform placeholder"):
            self.parse(f"Thought: x\n{TOOL_CALL}{call}{END}")

    @settings(max_examples=100, deadline=None)
    @given(thought=texts.map(neutralize), name=texts, args=json_values)
    @example(thought="", name="a", args={})
    @example(thought="\n", name="a", args={})
    @example(thought="a\n", name="a", args={})
    @example(thought="a\n\n", name="a", args={})
    def test_what_it_reads_renders_to_the_same_ids(self, thought, name, args):
        prompt = [user("q")]
        ids = ids_and_mask([*prompt, assistant(thought, name, args)])[0]
        message = TOKENIZER.parse_response(ids[len(self.PREFIX) :], prefix=self.PREFIX)
        function = message["tool_calls"][0]["function"]
        assert (function["name"], function["arguments"]) == (name, args)
        assert message["content"] in (thought, thought.removesuffix("\n"))
        assert ids_and_mask([*prompt, message])[0] == ids

    def test_padding_behind_the_end_is_no_part_of_the_turn(self):
        assert self.parse("Answer: 4<|end|><|pad|><|pad|>") == {"role": "assistant", "content": "Answer: 4"}

    def test_a_cut_answer_is_read_as_far_as_it_goes(self):
        assert self.parse("Answer: 4")["content"] == "Answer: 4"

    def test_a_turn_that_the_harness_began_is_read_whole(self):
        prefix = render_user("q") + PROTOCOL["forced_turn"]
        assert TOKENIZER.parse_response(" 42<|end|>", prefix=prefix)["content"] == FORCED_BODY + " 42"

    def test_streaming_gives_the_same_message(self):
        text = "Thought: x\n\n" + render_call("calc", {"expr": "1"})
        stream = TOKENIZER.get_response_parser(prefix=self.PREFIX)
        shown = [
            event["text"]
            for letter in text
            for event in stream.feed(letter)
            if event.get("field") == "content" and "text" in event
        ]
        assert "".join(shown) == "Thought: x\n\n"
        assert stream.finalize()[0] == self.parse(text)


class TestForeignTokens:
    def test_special_tokens_of_a_host_are_made_inert_too(self):
        template = build_chat_template(["</s>", "[INST]", "x", END, 'q"\\'])
        messages = [user('</s> [INST] x <|end|> q"\\'), assistant("", "a", {"b": "</s>"})]
        text = TOKENIZER.apply_chat_template(messages, chat_template=template, tokenize=False)
        assert text == (
            f'{USER}< /s> [ INST] x < |end|> q "\\{END}{ASSISTANT}{TOOL_CALL}'
            f'{{"tool": "a", "args": {{"b": "\\u003c/s>"}}}}{END}'
        )

    def test_without_any_it_is_the_native_template(self):
        assert build_chat_template() == build_chat_template(SPECIAL_TOKENS) == CHAT_TEMPLATE == TOKENIZER.chat_template


class TestTrl:
    """TRL's own checks, trainers and tool loop, with nothing patched."""

    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    @pytest.fixture
    def model(self):
        from stacklm_hf import StackConfig, StackForCausalLM

        config = StackConfig(
            vocab_size=len(TOKENIZER),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=512,
            **generation_defaults(TOKENIZER),
        )
        return StackForCausalLM(config)

    def arguments(self, path, **more):
        return {
            "output_dir": str(path),
            "per_device_train_batch_size": 2,
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            **more,
        }

    def test_it_finds_all_it_looks_for(self):
        from trl import chat_template_utils as trl

        assert trl.has_generation_markers(TOKENIZER.chat_template)
        assert trl.supports_tool_calling(TOKENIZER)
        assert trl.is_chat_template_prefix_preserving(TOKENIZER)
        assert trl.is_chat_template_stop_token_trained(TOKENIZER)
        assert trl.get_training_chat_template(TOKENIZER) is None

    def test_a_call_that_cannot_be_read_is_plain_text_to_it(self):
        from trl.chat_template_utils import parse_response

        ids = encode_trusted(TOKENIZER, "Thought: x\n<|tool_call|>{broken<|end|>")
        message = parse_response(TOKENIZER, ids, prefix=TestParsing.PREFIX)
        assert message == {"role": "assistant", "content": "Thought: x\n{broken"}

    def test_assistant_only_loss_trains_on_the_mask(self, model, tmp_path):
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        messages = [user("q"), assistant("Thought: é", "calc", {"expr": "1"}), result("1"), assistant("Answer: 1")]
        trainer = SFTTrainer(
            model,
            args=SFTConfig(**self.arguments(tmp_path, max_steps=2, assistant_only_loss=True)),
            train_dataset=Dataset.from_list([{"messages": messages}] * 4),
            processing_class=TOKENIZER,
        )
        ids, mask = ids_and_mask(messages)
        row = trainer.train_dataset[0]
        assert row["input_ids"] == ids
        assert row["labels"] == [i if trained else -100 for i, trained in zip(ids, mask, strict=True)]
        trainer.train()
        assert trainer.state.global_step == 2

    def test_its_tool_loop_speaks_the_wire_format(self, model, tmp_path, monkeypatch):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        called, rendered, finished = [], [], []

        def calc(expr: str) -> str:
            """Calculates.

            Args:
                expr: What to calculate.
            """
            called.append(expr)
            return "42 <|end|>"

        def reward(prompts, completions, **_):
            finished.extend(completions)
            return [float(i % 2) for i in range(len(completions))]

        def policy(prompt_ids, *_, **__):
            """A model that calls once and then answers."""
            rendered.extend(prompt_ids)
            call = "Thought: I compute.\n" + render_call("calc", {"expr": "21*2"})
            turns = ["Answer: 42<|end|>" if TOOL_RESULT in TOKENIZER.decode(ids) else call for ids in prompt_ids]
            return [encode_trusted(TOKENIZER, turn) for turn in turns], None

        trainer = GRPOTrainer(
            model,
            reward_funcs=reward,
            args=GRPOConfig(**self.arguments(tmp_path, max_steps=1, num_generations=2, max_completion_length=256)),
            train_dataset=Dataset.from_list([{"prompt": [user("What is 2 times 21?")]}] * 2),
            processing_class=TOKENIZER,
            tools=[calc],
        )
        monkeypatch.setattr(trainer, "_generate_single_turn", policy)  # the sampler, not the loop
        trainer.train()
        assert called == ["21*2"] * 2
        assert [message["content"] for message in finished[0]] == ["Thought: I compute.", "42 <|end|>", "Answer: 42"]
        conversation = [system(system_prompt(["calc(expr)"])), user("What is 2 times 21?"), *finished[0][:2]]
        assert rendered[-1] == ids_and_mask(conversation, add_generation_prompt=True)[0]
