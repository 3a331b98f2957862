"""The native tokenizer: same ids as the original, exact text back, the same after any number of saves."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GenerationConfig

from stacklm_hf.modeling.configuration_stack import StackConfig
from stacklm_hf.modeling.tokenization_stack import (
    SINGLE_DIGITS_PATTERN,
    SPLIT_PATTERN,
    StackTokenizerFast,
    generation_defaults,
    train_stack_tokenizer,
)
from stacklm_hf.protocol.tokens import END, PAD, SPECIAL_TOKENS

DATA = Path(__file__).parents[1] / "data"
NATIVE = ["native_tokenizer", "native_tokenizer_padded"]


def load(name: str) -> tuple[StackTokenizerFast, dict]:
    expected = json.loads((DATA / f"{name}.expected.json").read_text(encoding="utf-8"))
    return StackTokenizerFast.from_native(DATA / f"{name}.json"), expected


@pytest.fixture(scope="module")
def tokenizer() -> StackTokenizerFast:
    return load("native_tokenizer")[0]


class TestNativeFile:
    @pytest.mark.parametrize("name", NATIVE)
    def test_ids_are_those_of_the_original(self, name):
        tokenizer, expected = load(name)
        for case in expected["cases"]:
            assert tokenizer(case["text"])["input_ids"] == case["ids_specials_allowed"]
            assert tokenizer(case["text"], split_special_tokens=True)["input_ids"] == case["ids_plain"]

    @pytest.mark.parametrize("name", NATIVE)
    def test_bytes_come_first_and_control_tokens_last(self, name):
        tokenizer, expected = load(name)
        size = expected["vocab_size"]
        assert len(tokenizer) == tokenizer.vocab_size == size
        assert {t: tokenizer.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS} == expected["special_ids"]
        assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(size - 9, size))
        assert [tokenizer.decode([i]) for i in range(128)] == [chr(i) for i in range(128)]
        assert tokenizer.decode("é中😀".encode()) == "é中😀"

    def test_a_dict_is_as_good_as_a_file(self, tokenizer):
        native = json.loads((DATA / "native_tokenizer.json").read_text(encoding="utf-8"))
        assert StackTokenizerFast.from_native(native).backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()

    def test_padding_tokens_have_ids_but_no_text_ever_gives_one(self):
        tokenizer, expected = load("native_tokenizer_padded")
        first = tokenizer.convert_tokens_to_ids("<|unused_0|>")
        unused = range(first, first + expected["num_unused"])
        assert tokenizer.convert_ids_to_tokens(list(unused)) == [f"<|unused_{i}|>" for i in range(len(unused))]
        assert unused.stop == tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS[0])
        assert not set(tokenizer("<|unused_0|> <|unused_7|>")["input_ids"]) & set(unused)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda n: n.update(format="stacklm-bpe-v2"), "format is 'stacklm-bpe-v2'"),
            (lambda n: n.pop("merges"), "lacks the key 'merges'"),
            (lambda n: n.update(vocab_size="512"), "'vocab_size' must be of type int"),
            (lambda n: n.update(vocab_size=True), "'vocab_size' must be of type int"),
            (lambda n: n.update(vocab_size=513), "vocab_size is 513, but bytes, merges and special tokens make 512"),
            (lambda n: n["merges"].__setitem__(4, [1, 2, 3]), "merge 4 must be a pair of ids"),
            (lambda n: n["merges"].__setitem__(4, ["a", "b"]), "merge 4 must be a pair of ids"),
            (lambda n: n["merges"].__setitem__(0, [256, 97]), "merge 0 uses an id that does not exist yet"),
            (lambda n: n["merges"].__setitem__(0, [-1, 97]), "merge 0 uses an id that does not exist yet"),
            (lambda n: n["merges"].__setitem__(1, n["merges"][0]), "merge 1 makes the same text as id 256"),
            (lambda n: n["special_tokens"].reverse(), "special_tokens must end with <|bos|> <|eos|>"),
            (lambda n: n["special_tokens"].insert(0, "<|x|>"), "only <|unused_0|>"),
            (lambda n: n.update(pattern="(a"), "the split pattern does not compile"),
        ],
    )
    def test_a_malformed_file_is_refused_in_one_line(self, tmp_path, change, says):
        native = json.loads((DATA / "native_tokenizer.json").read_text(encoding="utf-8"))
        change(native)
        path = tmp_path / "broken.json"
        path.write_text(json.dumps(native), encoding="utf-8")
        with pytest.raises(ValueError, match=r"broken\.json: ") as caught:
            StackTokenizerFast.from_native(path)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
    def test_what_is_no_native_file_at_all_is_refused_in_one_line(self, tmp_path, content):
        (tmp_path / "broken.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"^[^\n]*broken\.json: [^\n]+$"):
            StackTokenizerFast.from_native(tmp_path / "broken.json")

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(ValueError, match=r"nowhere\.json: cannot be read \(No such file"):
            StackTokenizerFast.from_native(tmp_path / "nowhere.json")


class TestText:
    @settings(max_examples=200, deadline=None)
    @given(text=st.text())
    def test_decoding_gives_the_text_back(self, tokenizer, text):
        assert tokenizer.decode(tokenizer(text, split_special_tokens=True)["input_ids"]) == text

    @settings(max_examples=200, deadline=None)
    @given(parts=st.lists(st.sampled_from(SPECIAL_TOKENS) | st.text(max_size=8)))
    def test_markers_stay_whole_and_are_kept_by_decoding(self, tokenizer, parts):
        text = "".join(parts)
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert sum(i >= len(tokenizer) - 9 for i in ids) == sum(text.count(token) for token in SPECIAL_TOKENS)

    def test_markers_are_skipped_only_on_demand(self, tokenizer):
        ids = tokenizer("<|user|>hi<|end|>")["input_ids"]
        assert tokenizer.decode(ids) == "<|user|>hi<|end|>"
        assert tokenizer.decode(ids, skip_special_tokens=True) == "hi"

    # Without "Cn": categories of newer characters differ between the Unicode versions of the two regex engines.
    @settings(max_examples=200, deadline=None)
    @given(
        text=st.text(st.characters(exclude_categories=["Cs", "Cn"]) | st.sampled_from("aeth 's\n\t1290"), max_size=40)
    )
    def test_ids_are_those_of_a_textbook_byte_pair_encoder(self, text):
        tokenizer, _ = load("native_tokenizer_padded")
        native = json.loads((DATA / "native_tokenizer_padded.json").read_text(encoding="utf-8"))
        ranks = {tuple(pair): rank for rank, pair in enumerate(native["merges"])}
        expected: list[int] = []
        for piece in regex.findall(native["pattern"], text):
            ids = list(piece.encode())
            while pairs := [pair for pair in pairwise(ids) if pair in ranks]:
                best = min(pairs, key=ranks.__getitem__)
                at = next(i for i in range(len(ids)) if tuple(ids[i : i + 2]) == best)
                ids[at : at + 2] = [256 + ranks[best]]
            expected += ids
        assert tokenizer(text, split_special_tokens=True)["input_ids"] == expected


class TestSaving:
    def test_any_number_of_saves_changes_nothing(self, tokenizer, tmp_path):
        tokenizer.save_pretrained(tmp_path / "0")
        for i in range(3):
            AutoTokenizer.from_pretrained(tmp_path / str(i)).save_pretrained(tmp_path / str(i + 1))
        for name in ("tokenizer.json", "chat_template.jinja"):
            assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "3" / name).read_bytes()
        first, last = (json.loads((tmp_path / n / "tokenizer_config.json").read_text()) for n in "03")
        assert {key: last[key] for key in first} == first

    @pytest.mark.parametrize("name", NATIVE)
    @pytest.mark.parametrize("use_fast", [True, False])
    def test_the_auto_class_gives_the_same_tokenizer_on_the_slow_path_too(self, tmp_path, name, use_fast):
        tokenizer, expected = load(name)
        tokenizer.save_pretrained(tmp_path)
        reloaded = AutoTokenizer.from_pretrained(tmp_path, use_fast=use_fast)
        for case in expected["cases"]:
            assert reloaded(case["text"])["input_ids"] == case["ids_specials_allowed"]
        assert reloaded.special_tokens_map == tokenizer.special_tokens_map
        assert reloaded.all_special_ids == tokenizer.all_special_ids
        assert (reloaded.padding_side, reloaded.chat_template) == ("left", tokenizer.chat_template)
        assert reloaded.response_template == tokenizer.response_template

    def test_a_process_without_the_package_loads_the_same_tokenizer(self, tokenizer, tmp_path):
        tokenizer.save_pretrained(tmp_path)
        config = {"model_type": "stack", "auto_map": {"AutoConfig": "configuration_stack.StackConfig"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        source = Path(sys.modules[StackConfig.__module__].__file__).read_text(encoding="utf-8")
        (tmp_path / "configuration_stack.py").write_text(source, encoding="utf-8")
        program = (
            "import sys, json; sys.modules['stacklm_hf'] = None\n"
            "from transformers import AutoTokenizer\n"
            "for trust in (True, False):\n"
            f"    t = AutoTokenizer.from_pretrained({str(tmp_path)!r}, trust_remote_code=trust)\n"
            "    out = t.apply_chat_template([{'role': 'user', 'content': 'é <|end|>'}], return_dict=False)\n"
            "    print(json.dumps([out, t('a<|end|>')['input_ids'], t.eos_token_id, t.pad_token_id]))\n"
        )
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        message = [{"role": "user", "content": "é <|end|>"}]
        expected = [
            tokenizer.apply_chat_template(message, return_dict=False),
            tokenizer("a<|end|>")["input_ids"],
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
        ]
        assert [json.loads(line) for line in run.stdout.splitlines()] == [expected, expected]


class TestEndAndPadding:
    def test_the_end_of_a_turn_ends_generation_and_padding_is_a_token_of_its_own(self, tokenizer):
        assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)
        assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3

    def test_config_and_generation_config_agree(self, tokenizer):
        ids = generation_defaults(tokenizer)
        for config in (StackConfig(vocab_size=len(tokenizer)), GenerationConfig(**ids)):
            assert {key: getattr(config, key) for key in ids} == ids
            assert {key: getattr(tokenizer, key) for key in ids} == ids

    def test_nothing_is_added_around_a_text(self, tokenizer):
        assert tokenizer("a")["input_ids"] == [97]
        assert tokenizer("a", add_special_tokens=False)["input_ids"] == [97]

    def test_a_tokenizer_without_the_tokens_is_refused(self, tokenizer):
        stranger = copy.deepcopy(tokenizer)
        stranger._tokenizer = type(tokenizer.backend_tokenizer).from_str(
            tokenizer.backend_tokenizer.to_str().replace(END, "<|fin|>")
        )
        with pytest.raises(ValueError, match=r"lacks <\|end\|>"):
            generation_defaults(stranger)


class TestTraining:
    TEXTS = ("What is the hidden size of Stack-100M?", "The layer count of R-017 is 1024, é 中.") * 20

    def test_layout_is_the_native_one(self):
        tokenizer = train_stack_tokenizer(self.TEXTS, 300)
        assert len(tokenizer) == 300
        assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(291, 300))
        assert tokenizer.decode(range(128)) == "".join(map(chr, range(128)))
        assert "<|unused_0|>" not in tokenizer.get_vocab()
        assert tokenizer("the hidden size")["input_ids"] != list(b"the hidden size")

    def test_padding_tokens_fill_what_the_texts_do_not(self):
        tokenizer = train_stack_tokenizer(["ab"], 300)
        assert len(tokenizer) == 300
        assert tokenizer.convert_ids_to_tokens([256, 257, 290, 291]) == [
            "ab",
            "<|unused_0|>",
            "<|unused_33|>",
            "<|bos|>",
        ]

    def test_the_stream_is_read_once_and_the_result_is_the_same(self):
        first, second = (train_stack_tokenizer(iter(self.TEXTS), 320) for _ in range(2))
        assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
        assert first.backend_tokenizer.to_str() == train_stack_tokenizer(self.TEXTS, 320).backend_tokenizer.to_str()

    def test_merges_with_two_ways_to_one_token_keep_the_layout(self):
        tokenizer = train_stack_tokenizer(["aaa aaaa aaaaa baaa abab babab ababa"] * 9, 290)
        assert len(tokenizer) == 290
        assert tokenizer.decode(tokenizer("aaaaaaabab")["input_ids"]) == "aaaaaaabab"

    def test_digit_runs_are_of_at_most_three_or_single(self):
        texts = ["1234 123456 12345678 1234"] * 20
        assert train_stack_tokenizer(texts, 290).tokenize("12345678") == ["123", "456", "78"]
        assert train_stack_tokenizer(texts, 290, single_digits=True).tokenize("1234") == ["1", "2", "3", "4"]
        assert train_stack_tokenizer(texts, 290, pattern=r"\d+|\D+").tokenize("1234") == ["1234"]

    def test_the_default_pattern_is_that_of_the_native_files(self):
        native = json.loads((DATA / "native_tokenizer.json").read_text(encoding="utf-8"))
        assert native["pattern"] == SPLIT_PATTERN
        assert native["pattern"].replace(r"\p{N}{1,3}", r"\p{N}") == SINGLE_DIGITS_PATTERN

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"vocab_size": 264}, "264 is too small: at least 265"),
            ({"vocab_size": 300, "pattern": "(a"}, "does not compile"),
            ({"vocab_size": 300, "pattern": "a", "single_digits": True}, "either a pattern or single_digits"),
        ],
    )
    def test_what_cannot_be_trained_is_said(self, arguments, says):
        with pytest.raises(ValueError, match=says):
            train_stack_tokenizer(self.TEXTS, **arguments)

    def test_one_text_is_not_taken_for_a_stream_of_letters(self):
        with pytest.raises(ValueError, match="not one text"):
            train_stack_tokenizer("abc", 300)

    def test_the_smallest_vocabulary_is_bytes_and_control_tokens(self):
        assert train_stack_tokenizer([], 265)("é<|end|>")["input_ids"] == [195, 169, 262]
