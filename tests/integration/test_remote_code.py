"""A saved folder loads in a fresh process: with the package, and without it by trust_remote_code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from stacklm_hf.modeling import convert_native

DATA = Path(__file__).parent.parent / "data"

# As if the package were not installed, whatever this environment holds.
WITHOUT_PACKAGE = """
import sys
sys.modules["stacklm_hf"] = None
"""
WITH_PACKAGE = "import stacklm_hf\n"
REPORT = """
import json, sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
folder, inputs, out, again = sys.argv[1:5]
ids = load_file(inputs)["input_ids"]
config = AutoConfig.from_pretrained(folder, **trust)
tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
model = AutoModelForCausalLM.from_pretrained(folder, **trust)
base = AutoModel.from_pretrained(folder, **trust)
with torch.no_grad():
    logits, hidden = model(ids).logits, base(ids).last_hidden_state
save_file({"logits": logits, "from_base": hidden @ model.lm_head.weight.T}, out)
greedy = model.generate(ids[:1, :7], max_new_tokens=12, do_sample=False)
generate = pipeline("text-generation", model=folder, **trust)
text = generate("<|user|>2021<|end|>", max_new_tokens=4, do_sample=False, return_full_text=False)[0]["generated_text"]
model.save_pretrained(again)
tokenizer.save_pretrained(again)
print(json.dumps({
    "classes": [type(x).__module__ + "." + type(x).__name__ for x in (config, model, base)],
    "ids": tokenizer("<|user|>What is 2021 * 2?<|end|>").input_ids,
    "greedy": greedy.tolist(),
    "text": text,
    "nope_layers": config.nope_layers,
    "installed": "stacklm_hf" in sys.modules and sys.modules["stacklm_hf"] is not None,
}))
"""


def load(folder: Path, work: Path, *, package: bool) -> tuple[dict, dict]:
    """Load `folder` in a fresh process, save it again to `work`/again; return what it computed there."""
    work.mkdir()
    expected = load_file(DATA / "native_tiny.expected.safetensors")
    save_file({"input_ids": expected["input_ids"]}, work / "inputs.safetensors")
    trust = "trust = {}" if package else "trust = {'trust_remote_code': True}"
    code = (WITH_PACKAGE if package else WITHOUT_PACKAGE) + trust + REPORT
    paths = [folder, work / "inputs.safetensors", work / "out.safetensors", work / "again"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=work,
        env={**os.environ, "HF_HOME": str(work / "hf"), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), load_file(work / "out.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return convert_native(
        DATA / "native_tiny.pt",
        tmp_path_factory.mktemp("remote") / "stack",
        tokenizer=DATA / "native_tokenizer.json",
    )


def test_every_road_gives_the_same(folder, tmp_path):
    expected = load_file(DATA / "native_tiny.expected.safetensors")
    packaged, tensors = load(folder, tmp_path / "packaged", package=True)
    assert packaged["installed"]
    assert all(name.startswith("stacklm_hf.") for name in packaged["classes"])
    assert packaged["greedy"] == expected["greedy"].tolist()
    assert abs(tensors["logits"] - expected["logits"]).max() < 1e-5
    assert abs(tensors["from_base"] - tensors["logits"]).max() < 1e-5

    # Without the package, from what convert_native saved; then from what such a process saved; then that again with it.
    remote, remote_tensors = load(folder, tmp_path / "remote", package=False)
    twice, twice_tensors = load(tmp_path / "remote" / "again", tmp_path / "twice", package=False)
    back, back_tensors = load(tmp_path / "twice" / "again", tmp_path / "back", package=True)
    assert not remote["installed"]
    assert not twice["installed"]
    assert all(name.startswith("transformers_modules.") for name in remote["classes"] + twice["classes"])
    assert all(name.startswith("stacklm_hf.") for name in back["classes"])
    for result, computed in ((remote, remote_tensors), (twice, twice_tensors), (back, back_tensors)):
        for key in ("ids", "greedy", "text", "nope_layers"):
            assert result[key] == packaged[key]
        for name, tensor in computed.items():
            assert tensor.equal(tensors[name]), name


def test_the_saved_code_needs_nothing_but_its_neighbours(folder):
    for file in folder.glob("*.py"):
        imports = [line for line in file.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert imports
        for line in imports:
            module = line.split()[1]
            if module.startswith("."):
                assert (folder / f"{module[1:]}.py").is_file(), line
            else:
                allowed = {"__future__", "collections", "huggingface_hub", "math", "torch", "transformers", "typing"}
                assert module.split(".")[0] in allowed, line


def test_without_trust_it_asks_for_it(folder, tmp_path):
    code = WITHOUT_PACKAGE + (
        "from transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=False)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "trust_remote_code=True" in done.stderr
