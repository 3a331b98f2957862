"""Tokens per CPU second of stack-100m against transformers' own Qwen3ForCausalLM of the same shape.

    python tests/benchmarks/bench_model.py [--threads N] [--repeats N] [--json FILE]

Both models are timed in turn, in one run, by the time of the process and on one thread, so that other load on the
machine counts as little as it can; what counts is the best of the repeats. A ratio above 1 means that Stack is faster.
About three minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from stacklm_hf import StackConfig, StackForCausalLM
from stacklm_hf.modeling.export import qwen3_config

PREFILL, PROMPT, NEW = 512, 32, 16
TRAIN_SHAPE = (1, 256)


def build() -> dict[str, PreTrainedModel]:
    """Stack-100M, and a Qwen3 with the same weights (Qwen3 applies RoPE in every layer, so it computes otherwise)."""
    torch.manual_seed(0)
    config = StackConfig.from_preset("stack-100m")
    stack = StackForCausalLM(config)
    qwen3 = Qwen3ForCausalLM(qwen3_config(StackConfig.from_preset("stack-100m", nope_every=0)))
    qwen3.load_state_dict(stack.state_dict())
    return {"stack": stack.eval(), "qwen3": qwen3.eval()}


def prefill(model: PreTrainedModel) -> int:
    ids = torch.randint(1000, (1, PREFILL))
    with torch.inference_mode():
        model(ids, logits_to_keep=1)
    return PREFILL


def decode(batch: int) -> Callable[[PreTrainedModel], int]:
    def run(model: PreTrainedModel) -> int:
        ids = torch.randint(1000, (batch, PROMPT))
        model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=NEW, max_new_tokens=NEW, do_sample=False
        )
        return batch * NEW

    return run


def train(model: PreTrainedModel) -> int:
    ids = torch.randint(1000, TRAIN_SHAPE)
    model.train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    # The optimizer's step is the same for both; plain SGD keeps its share of the time small.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=-1e-6)
    model.zero_grad()
    model.eval()
    return ids.numel()


JOBS: dict[str, Callable[[PreTrainedModel], int]] = {
    f"prefill {PREFILL}": prefill,
    "decode, batch 1": decode(1),
    "decode, batch 8": decode(8),
    "decode, batch 32": decode(32),
    f"train {TRAIN_SHAPE[0]} x {TRAIN_SHAPE[1]}": train,
}


def compare(
    models: dict[str, PreTrainedModel], job: Callable[[PreTrainedModel], int], repeats: int
) -> dict[str, float]:
    """The best tokens per second of each model, and their ratio."""
    best = dict.fromkeys(models, 0.0)
    for repeat in range(repeats + 1):
        for name in list(models)[:: 1 if repeat % 2 else -1]:
            start = time.process_time()
            tokens = job(models[name])
            if repeat:  # the first is a warm-up
                best[name] = max(best[name], tokens / (time.process_time() - start))
    return {**best, "ratio": best["stack"] / best["qwen3"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each model and job")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    models, results = build(), {}
    print(f"{'tokens per second':<20}{'stack-100m':>12}{'qwen3':>12}{'ratio':>8}")
    for name, job in JOBS.items():
        results[name] = row = compare(models, job, arguments.repeats)
        print(f"{name:<20}{row['stack']:>12.1f}{row['qwen3']:>12.1f}{row['ratio']:>8.3f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
