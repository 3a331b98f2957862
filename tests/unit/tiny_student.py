"""A student so small that it trains in seconds, and that calls tools, answers and errs: for tests of the trainers."""

import atexit
import functools
import shutil
import tempfile

from transformers import PreTrainedTokenizerBase, set_seed

from stacklm_hf.data.dataset import build_dataset
from stacklm_hf.rollout import ScriptedTeacher, run_episodes
from stacklm_hf.training.sft import default_sft_config, make_trainer
from stacklm_hf.training.student import build_student, build_tokenizer
from stacklm_hf.worlds.base import Task
from stacklm_hf.worlds.research import ResearchEnvironment, build_corpus, make_task_pool

# vLLM's attention on a CPU takes heads of 32 and more.
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512}  # fmt: skip


@functools.cache
def world() -> tuple[list[Task], list[Task], ResearchEnvironment]:
    """Training tasks, held-out tasks and the environment; look-ups and doubles, whose episodes are short."""
    train, heldout = ([task for task in part if len(task.facts) == 1] for part in make_task_pool())
    return train, heldout, ResearchEnvironment(build_corpus())


@functools.cache
def tiny_student() -> tuple[str, PreTrainedTokenizerBase]:
    """The folder of a checkpoint after some SFT, made once in a process, and its tokenizer."""
    train, _, environment = world()
    folder = tempfile.mkdtemp(prefix="tiny-student-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer = build_tokenizer(folder, train, environment, 512)
    dataset, _ = build_dataset(run_episodes(ScriptedTeacher(tokenizer), train, environment), tokenizer)
    set_seed(0)
    model = build_student(tokenizer, "stack-demo", 0, **SIZES)
    config = default_sft_config(f"{folder}/sft", max_steps=60, learning_rate=1e-2, muon_learning_rate=0.02, bf16=False,
                                use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True)  # fmt: skip
    make_trainer(model, tokenizer, dataset, config).train()
    model.save_pretrained(folder)
    return folder, tokenizer
