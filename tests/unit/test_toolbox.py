"""`ToolBox`: one door to the tools; bad calls, failing tools and endless observations all become bounded text."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stacklm_hf.tools import BM25Retriever, CalcTool, Passage, SearchTool, Tool, ToolBox, ToolSpec
from stacklm_hf.tools.schema import check_arguments

PROTOCOL = json.loads((Path(__file__).parents[1] / "data" / "protocol.json").read_text())
PASSAGES = [
    Passage("d0", "the publication year of RMSNorm is 2019."),
    Passage("d1", "the publication\nyear of \t Adam is\r\n2014."),
]


@pytest.fixture
def box():
    return ToolBox([SearchTool(BM25Retriever(PASSAGES)), CalcTool()])


class Scripted:
    """A tool that does what its function does."""

    def __init__(self, function, properties=None, name="tool", **schema):
        self.spec = ToolSpec(name, "A tool.", {"type": "object", "properties": properties or {}, **schema})
        self._function = function

    def __call__(self, **arguments: Any) -> str:
        return self._function(**arguments)


def test_specs_make_the_system_prompts_line(box):
    assert [spec.signature() for spec in box.specs] == ["search(query,k)", "calc(expr)"]
    assert PROTOCOL["system_prompt"].endswith(f"Tools: {', '.join(spec.signature() for spec in box.specs)}.")


def test_the_tools_are_tools():
    assert isinstance(CalcTool(), Tool)
    assert isinstance(SearchTool(BM25Retriever([])), Tool)


def test_hits_are_numbered_on_one_line(box):
    assert box.call("search", {"query": "publication year of RMSNorm", "k": 2}) == (
        "[1] the publication year of RMSNorm is 2019. [2] the publication year of Adam is 2014."
    )
    assert box.call("search", {"query": "Adam", "k": 9}) == "[1] the publication year of Adam is 2014."
    hits = PROTOCOL["search_hits"]

    class Fixed:
        def search(self, query, k):
            return [(Passage(text, text), 1.0) for text in hits["hits"]][:k]

    assert ToolBox([SearchTool(Fixed())]).call("search", {"query": "x", "k": 2}) == hits["rendered"]


@pytest.mark.parametrize("query", ["zebra", "", "?!"])
def test_nothing_found_is_no_results(box, query):
    assert box.call("search", {"query": query, "k": 1}) == PROTOCOL["observations"]["no_results"]


def test_calc_gives_its_value_or_its_own_error(box):
    assert box.call("calc", {"expr": "2021*2"}) == "4042"
    assert box.call("calc", {"expr": "1/0"}) == "CalcError: division by zero"


def test_the_grammar_of_an_argument_is_narrower_than_the_tool(box):
    """A teacher without constrained decoding may write text that the grammar would not allow."""
    assert box.call("search", {"query": "RMSNorm's year & more, " * 9, "k": 1}).startswith("[1] ")


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("browse", {}, "unknown tool 'browse'; the tools are search, calc"),
        (None, {}, "unknown tool None; the tools are search, calc"),
        (["calc"], {}, "unknown tool ['calc']; the tools are search, calc"),
        ("a\nb", {}, "unknown tool 'a\\nb'; the tools are search, calc"),
        ("calc", ["1+1"], "the arguments must be an object"),
        ("calc", None, "the arguments must be an object"),
        ("calc", {}, "missing argument expr"),
        ("calc", {"expression": "1"}, "missing argument expr"),
        ("calc", {"expr": "1", "x": 1}, "unknown argument 'x'; the arguments are expr"),
        ("calc", {"expr": 7}, "expr must be of type string, got integer"),
        ("search", {"query": "a"}, "missing argument k"),
        ("search", {"query": "a", "k": "2"}, "k must be of type integer, got string"),
        ("search", {"query": "a", "k": True}, "k must be of type integer, got boolean"),
        ("search", {"query": "a", "k": 2.0}, "k must be of type integer, got number"),
        ("search", {"query": "a", "k": None}, "k must be of type integer, got null"),
        ("search", {"query": "a", "k": 0}, "k must be at least 1"),
        ("search", {"query": "a", "k": 10}, "k must be at most 9"),
        ("search", {"query": "a" * 1001, "k": 1}, "query must have at most 1000 characters"),
        ("search", {"query": ["a"], "k": 1}, "query must be of type string, got array"),
    ],
)
def test_a_call_that_cannot_run_is_a_tool_error(box, name, arguments, reason):
    assert box.call(name, arguments) == f"{PROTOCOL['observations']['tool_error_prefix']}{reason}"


@pytest.mark.parametrize("error", [ValueError("bad\nvalue"), RecursionError(), MemoryError(), OSError(2, "gone")])
def test_a_failing_tool_is_a_tool_error(error):
    def fail():
        raise error

    result = ToolBox([Scripted(fail)]).call("tool", {})
    assert result.startswith(f"ToolError: tool failed with {type(error).__name__}:")
    assert "\n" not in result


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_what_stops_the_process_passes_through(stop):
    def fail():
        raise stop

    with pytest.raises(stop):
        ToolBox([Scripted(fail)]).call("tool", {})


def test_a_tool_that_returns_no_text_is_a_tool_error():
    assert ToolBox([Scripted(lambda: 4)]).call("tool", {}) == "ToolError: tool returned int instead of text"


def test_observations_are_bounded_and_keep_their_lines():
    box = ToolBox([Scripted(lambda n: "line\n" * n, {"n": {"type": "integer"}})], max_observation_chars=1000)
    assert box.call("tool", {"n": 2}) == "line\nline\n"
    assert box.call("tool", {"n": 200}) == "line\n" * 200
    cut = box.call("tool", {"n": 10**6})
    assert len(cut) == 1000
    assert cut.endswith(" [cut]")


def test_errors_are_bounded_and_encodable():
    def fail():
        raise ValueError("\ud800 x" * 10**6)

    result = ToolBox([Scripted(fail)]).call("tool", {})
    assert len(result) <= 250
    result.encode()
    assert len(ToolBox([]).call("x" * 10**6, {})) <= 250


def test_lone_surrogates_do_not_reach_the_tokenizer():
    box = ToolBox([Scripted(lambda text: text, {"text": {"type": "string"}})])
    assert box.call("tool", {"text": json.loads('"a\\ud800b \\ud83d\\ude00"')}) == "a?b 😀"


def test_a_box_is_checked_when_it_is_made():
    with pytest.raises(ValueError, match="two tools are named 'calc'"):
        ToolBox([CalcTool(), CalcTool()])
    with pytest.raises(ValueError, match="max_observation_chars must be at least"):
        ToolBox([CalcTool()], max_observation_chars=10)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["search", "calc"]) | st.text(), st.dictionaries(st.sampled_from(["query", "k", "expr"]), _JSON))
def test_any_call_gives_bounded_encodable_text(name, arguments):
    result = ToolBox([SearchTool(BM25Retriever(PASSAGES)), CalcTool()]).call(name, arguments)
    assert 0 < len(result.encode()) <= 32_000


STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (STRING, ["", "a"], [1, None, True, []]),
        ({"type": "integer"}, [0, -5], [True, 1.0, "1"]),
        ({"type": "number"}, [0, 1.5], [True, float("nan"), "1"]),
        ({"type": "boolean"}, [True, False], [0, 1, "true"]),
        ({"type": "null"}, [None], [0, False, ""]),
        ({"type": ["string", "null"]}, ["a", None], [1, False]),
        ({"type": "string", "pattern": "[a-z]{2}"}, ["ab"], ["abc", "ab\n", "xab", ""]),
        ({"type": "string", "minLength": 1, "maxLength": 2}, ["a", "ab"], ["", "abc"]),
        ({"type": "integer", "minimum": 1, "maximum": 3}, [1, 3], [0, 4]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5], [0, 1]),
        ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", True, 2]),
        ({"const": 1}, [1], [True, 2]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["a", True]),
        ({"type": "array", "items": STRING, "minItems": 1, "maxItems": 2}, [["a"]], [[], [1], ["a"] * 3, "a"]),
        (
            {"type": "object", "properties": {"a": STRING}, "required": ["a"], "additionalProperties": False},
            [{"a": "x"}],
            [{}, {"a": 1}, {"a": "x", "b": 1}],
        ),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1}], [{"x": "1"}]),
        ({"x-grammar": "[a-z]", "format": "date"}, ["anything", 1], []),
    ],
)
def test_schema_keywords(schema, good, bad):
    spec = ToolSpec("tool", "A tool.", {"type": "object", "properties": {"value": schema}})
    assert [value for value in good if check_arguments(spec, {"value": value}) is not None] == []
    assert [value for value in bad if check_arguments(spec, {"value": value}) is None] == []


def test_a_problem_inside_a_value_is_named_by_its_path():
    item = {"type": "object", "properties": {"path": STRING}, "required": ["path"]}
    spec = ToolSpec("tool", "A tool.", {"type": "object", "properties": {"files": {"type": "array", "items": item}}})
    assert check_arguments(spec, {"files": [{"path": "a"}, {"path": 3}]}) == (
        "files[1].path must be of type string, got integer"
    )
    assert check_arguments(spec, {"files": [{}]}) == "missing argument files[0].path"


def test_arguments_are_optional_only_where_the_schema_says_so():
    properties = {"a": STRING, "b": STRING}
    assert ToolBox([Scripted(lambda a, b="-": a + b, properties, required=["a"])]).call("tool", {"a": "x"}) == "x-"
    assert ToolBox([Scripted(lambda a, b: a + b, properties)]).call("tool", {"a": "x"}) == (
        "ToolError: missing argument b"
    )


def test_a_schema_may_allow_more_arguments():
    box = ToolBox([Scripted(lambda **extra: repr(extra), additionalProperties=True)])
    assert box.call("tool", {"x": 1}) == "{'x': 1}"
