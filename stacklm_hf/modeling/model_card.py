"""Model cards filled from a configuration and an evaluation, with the metadata the Hub reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCardData

from stacklm_hf.modeling.configuration_stack import StackConfig
from stacklm_hf.modeling.modeling_stack import StackForCausalLM

Results = Mapping[str, Mapping[str, float | int]]

_TEMPLATE = """---
{metadata}
---

# {name}

A decoder-only language model of the Stack architecture, made with
[stacklm_hf](https://pypi.org/project/stacklm-hf/): small, and narrow enough to use tools reliably.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
```

After `import stacklm_hf`, `trust_remote_code` is not needed.

## Architecture

{architecture}

## Evaluation

{evaluation}
"""


def render_model_card(
    config: StackConfig, results: Results | None = None, *, name: str = "stack-model", base_model: str | None = None
) -> str:
    """Write the card of a model.

    Args:
        config: The model's configuration.
        results: Of each split or task shape, its metrics: `{"held-out": {"accuracy": 0.98, "n": 50}}`.
        name: Name of the model, as `from_pretrained` takes it.
        base_model: Model that this one was tuned from.

    Returns:
        Markdown with YAML metadata in front.
    """
    metadata = ModelCardData(
        model_name=name,
        base_model=base_model,
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["stacklm_hf", "tool-use"],
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type="stacklm_hf",
                dataset_name=f"stacklm_hf, {split}",
                metric_type="accuracy",
                metric_value=metrics["accuracy"],
            )
            for split, metrics in (results or {}).items()
            if "accuracy" in metrics
        ],
    )
    return _TEMPLATE.format(
        metadata=metadata.to_yaml(),
        name=name,
        architecture=_table(["", ""], _architecture(config)),
        evaluation=_evaluation(results),
    )


def write_model_card(folder: Path, config: StackConfig, results: Results | None = None, **kwargs: Any) -> Path:
    """Write the card to `folder`/README.md; see `render_model_card` for the arguments. Returns the file."""
    path = folder / "README.md"
    path.write_text(render_model_card(config, results, **kwargs), encoding="utf-8")
    return path


def _architecture(config: StackConfig) -> list[list[str]]:
    with torch.device("meta"):
        model = StackForCausalLM(config)
    embedding = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    rows = [
        ["parameters", f"{model.num_parameters():,} ({model.num_parameters() - embedding:,} without the embedding)"],
        ["vocabulary", f"{config.vocab_size:,}{', tied' if config.tie_word_embeddings else ''}"],
        ["context", f"{config.max_position_embeddings:,} tokens"],
        ["layers", str(config.num_hidden_layers)],
        ["hidden size, SwiGLU inner size", f"{config.hidden_size}, {config.intermediate_size}"],
        [
            "query heads, key-value heads, head dimension",
            f"{config.num_attention_heads}, {config.num_key_value_heads}, {config.head_dim}",
        ],
        ["RoPE base", f"{config.rope_parameters['rope_theta']:g}"],  # type: ignore[index]
        ["layers without RoPE", ", ".join(map(str, config.nope_layers)) or "none"],
    ]
    for label, cap in (("logit", config.final_logit_softcapping), ("attention", config.attn_logit_softcapping)):
        if cap is not None:
            rows.append([f"{label} soft cap", f"{cap:g}"])
    return rows


def _evaluation(results: Results | None) -> str:
    if not results:
        return "Not evaluated."
    columns = list(dict.fromkeys(metric for metrics in results.values() for metric in metrics))
    rows = [[split, *(_number(metrics.get(c)) for c in columns)] for split, metrics in results.items()]
    return _table(["", *columns], rows)


def _number(value: float | int | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


__all__ = ["Results", "render_model_card", "write_model_card"]
