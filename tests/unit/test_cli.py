"""The command line: what a user can get wrong is one line on standard error and exit status 2."""

import pytest

from stacklm_hf.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask", "--model", "/no/such", "q"], "is no checkpoint"),
        (["ask", "--model", "/no/such", "--documents", "/no/such", "q"], "no such file or folder"),
        (["convert", "/no/such", "/tmp/out"], "no checkpoint at /no/such"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_broken_file_is_one_line_for_every_command(name, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "stack", "nope_every": 0, "num_hidden_layers": 1}')
    (tmp_path / name).write_text('{"model_type": "stack", "num_hidden_layers": "x"}')
    assert main(["export-qwen3", str(tmp_path), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("option", [["--seed", "-1"], ["--tasks", "0"], ["--batch-size", "x"]])
def test_numbers_out_of_range_are_told_before_a_folder_is_made(option, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--out", str(tmp_path / "run"), *option])
    assert stop.value.code == 2
    assert option[0] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_bug_is_not_hidden(monkeypatch):
    monkeypatch.setattr("stacklm_hf.worlds.research.build_corpus", lambda seed: {}["bug"])
    with pytest.raises(KeyError):
        main(["ask", "--model", "/no/such", "q"])
