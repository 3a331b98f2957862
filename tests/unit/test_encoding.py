"""Trusted text carries control tokens, untrusted text never does, on any tokenizer and from any thread."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PythonBackend

from stacklm_hf.modeling.tokenization_stack import StackTokenizerFast
from stacklm_hf.protocol.encoding import encode_trusted, encode_untrusted
from stacklm_hf.protocol.tokens import SPECIAL_TOKENS

DATA = Path(__file__).parents[1] / "data"
hostile = st.lists(
    st.sampled_from([*SPECIAL_TOKENS, "<|", "|>", "<", "end", "<|unused_0|>", "<|endoftext|>", " "])
    | st.text(max_size=6)
).map("".join)


def native(name: str = "native_tokenizer") -> StackTokenizerFast:
    return StackTokenizerFast.from_native(DATA / f"{name}.json")


def host() -> PreTrainedTokenizerFast:
    """Somebody else's byte-level tokenizer: its own end token in front, then the nine."""
    backend = json.loads(native().backend_tokenizer.to_str())
    backend["added_tokens"] = []
    backend["model"]["vocab"] = {k: v for k, v in backend["model"]["vocab"].items() if k not in SPECIAL_TOKENS}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)), eos_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"extra_special_tokens": list(SPECIAL_TOKENS)})
    return tokenizer


TOKENIZERS = {"native": native(), "padded": native("native_tokenizer_padded"), "host": host()}


@pytest.mark.parametrize("name", ["native_tokenizer", "native_tokenizer_padded"])
def test_both_kinds_give_the_ids_of_the_original(name):
    tokenizer = native(name)
    for case in json.loads((DATA / f"{name}.expected.json").read_text(encoding="utf-8"))["cases"]:
        assert encode_trusted(tokenizer, case["text"]) == case["ids_specials_allowed"]
        assert encode_untrusted(tokenizer, case["text"]) == case["ids_plain"]


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(text=hostile)
def test_untrusted_text_comes_back_exactly_and_holds_no_special_id(tokenizer, text):
    ids = encode_untrusted(tokenizer, text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.tuples(st.sampled_from(SPECIAL_TOKENS), st.text(max_size=6))))
def test_spans_between_control_tokens_are_encoded_as_if_alone(tokenizer, parts):
    expected = []
    for marker, text in parts:
        expected += [tokenizer.convert_tokens_to_ids(marker), *encode_untrusted(tokenizer, text)]
    assert encode_trusted(tokenizer, "".join(marker + text for marker, text in parts)) == expected


def test_state_of_the_callers_tokenizer_neither_matters_nor_changes():
    tokenizer = native()
    plain, control = encode_untrusted(tokenizer, "<|end|> abc"), encode_trusted(tokenizer, "<|end|> abc")
    tokenizer("abc", max_length=1, truncation=True, padding="max_length", split_special_tokens=True)
    before = tokenizer.backend_tokenizer.to_str()
    assert encode_untrusted(tokenizer, "<|end|> abc") == plain
    assert encode_trusted(tokenizer, "<|end|> abc") == control
    assert tokenizer.backend_tokenizer.to_str() == before
    assert tokenizer("<|end|> abc")["input_ids"] == control


def test_one_tokenizer_serves_many_threads_at_once():
    tokenizer = native()
    text = "<|tool_result|>the value is 42<|end|>" * 20
    jobs = [
        lambda: encode_trusted(tokenizer, text),
        lambda: encode_untrusted(tokenizer, text),
        lambda: tokenizer(text, split_special_tokens=True)["input_ids"],
    ]
    expected = [job() for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: jobs[i % 2](), range(400)))
        assert all(result == expected[i % 2] for i, result in enumerate(results))
        list(pool.map(lambda i: jobs[i % 3](), range(300)))  # with callers that switch the shared state around
    assert encode_trusted(tokenizer, text) == expected[0]
    assert encode_untrusted(tokenizer, text) == expected[1]


def test_tokens_added_later_are_noticed():
    tokenizer = native()
    assert encode_trusted(tokenizer, "<|new|>") == encode_untrusted(tokenizer, "<|new|>")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|new|>"]}, replace_extra_special_tokens=False)
    assert encode_trusted(tokenizer, "<|new|>") == [512]
    assert 512 not in encode_untrusted(tokenizer, "<|new|>")


def test_half_a_surrogate_pair_from_json_counts_as_the_replacement_character():
    for encode in (encode_trusted, encode_untrusted):
        assert native().decode(encode(native(), json.loads('"a\\ud83d b"'))) == "a\ufffd b"
        assert native().decode(encode(native(), "\ud83d\ude00")) == "😀"


def test_a_model_that_holds_its_end_token_as_an_ordinary_piece_cannot_be_tricked():
    pieces = [
        ("<unk>", 0.0),
        ("</s>", -1.0),
        ("▁", -2.0),
        ("a", -2.0),
        ("<", -3.0),
        ("/", -3.0),
        ("s", -3.0),
        (">", -3.0),
    ]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    assert tokenizer.eos_token_id in tokenizer("a</s>", split_special_tokens=True)["input_ids"]  # the trap
    tokens = tokenizer.convert_ids_to_tokens(encode_untrusted(tokenizer, "a</s>é"))
    assert [token for token in tokens if token != "▁"] == ["a", "<", "/", "s", ">", "<unk>"]


def test_a_special_token_of_one_letter_that_cannot_be_taken_apart_is_dropped():
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "#": 1, "a": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("#", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert encode_untrusted(tokenizer, "a # a") == [2, 2]


def test_a_tokenizer_without_the_backend_is_refused():
    class Letters(PythonBackend):
        @property
        def vocab_size(self):
            return 1

        def get_vocab(self):
            return {"a": 0}

    with pytest.raises(TypeError, match="Letters has no `tokenizers` backend"):
        encode_trusted(Letters(), "a")


def test_what_is_no_text_is_refused():
    with pytest.raises(TypeError):
        encode_untrusted(native(), None)
