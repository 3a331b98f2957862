"""The collecting recipe: a folder holds one collection, and a run again goes on with it."""

import runpy
import sys
from pathlib import Path

import pytest

from stacklm_hf.data.dataset import load_rows

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "collect.py"
FEW = ["--tasks_per_shape", "4", "--world_seeds", "1", "--vocab_size", "300"]


@pytest.fixture
def collect(monkeypatch, tmp_path):
    def run(*options):
        monkeypatch.setattr(sys, "argv", ["collect.py", "--out", str(tmp_path), *FEW, *options])
        runpy.run_path(str(RECIPE), run_name="__main__")
        return load_rows(tmp_path / "dataset.parquet")

    return run


def test_run_again_it_keeps_the_tokenizer_and_the_trajectories(collect, tmp_path):
    first = collect()
    written = (
        (tmp_path / "tokenizer" / "tokenizer.json").stat().st_mtime_ns,
        (tmp_path / "trajectories.jsonl").read_bytes(),
    )
    assert collect().to_dict() == first.to_dict()
    again = (
        (tmp_path / "tokenizer" / "tokenizer.json").stat().st_mtime_ns,
        (tmp_path / "trajectories.jsonl").read_bytes(),
    )
    assert again == written


@pytest.mark.parametrize("options", [["--split", "shape:sum"], ["--vocab_size", "320"], ["--samples", "2"]])
def test_another_collection_in_the_same_folder_is_refused(collect, options):
    kinds = collect()["kind"]
    assert "sum" in kinds
    with pytest.raises(SystemExit, match=r"error: .* holds a run with other settings"):
        collect(*options)


def test_a_wrong_argument_is_one_line(collect):
    with pytest.raises(SystemExit, match="error: unknown split 'nope'"):
        collect("--split", "nope")
