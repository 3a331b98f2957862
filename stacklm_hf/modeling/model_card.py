"""Model cards filled from a configuration and an evaluation, with the metadata the Hub reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCardData

from stacklm_hf.modeling.configuration_stack import StackConfig
from stacklm_hf.modeling.modeling_stack import StackForCausalLM

Results = Mapping[str, Mapping[str, Any]]

_TEMPLATE = """---
{metadata}
---

# {name}

A decoder-only language model of the Stack architecture, made with stacklm_hf: small, and narrow enough to use tools
reliably.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
```

With the package installed, `import stacklm_hf` stands in for `trust_remote_code=True`.

## Architecture

{architecture}

## Evaluation

{evaluation}
"""


def render_model_card(
    config: StackConfig,
    results: Results | None = None,
    *,
    name: str = "stack-model",
    base_model: str | None = None,
    datasets: list[str] | None = None,
    license: str | None = None,
) -> str:
    """Write the card of a model.

    Args:
        config: The model's configuration.
        results: Of each split or task shape, its metrics, as `{"held-out": {"accuracy": 0.98, "n": 50}}`. "accuracy"
            becomes an evaluation result on the Hub; whatever is not a number is left out.
        name: Name of the model, as `from_pretrained` takes it.
        base_model: Model on the Hub that this one was tuned from.
        datasets: Datasets on the Hub that it was trained on.
        license: Identifier of the model's licence. None leaves it open: it is its owner's to choose.

    Returns:
        Markdown with YAML metadata in front.
    """
    metadata = ModelCardData(
        model_name=name if results else None,
        base_model=base_model,
        datasets=datasets,
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["stacklm_hf", "tool-use"],
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type="stacklm_hf",
                dataset_name="stacklm_hf",
                dataset_split=split,
                metric_type="accuracy",
                metric_value=metrics["accuracy"],
            )
            for split, metrics in (results or {}).items()
            if "accuracy" in metrics
        ]
        or None,
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
    rows = {split: {m: v for m, v in metrics.items() if _is_number(v)} for split, metrics in results.items()}
    columns = list(dict.fromkeys(metric for metrics in rows.values() for metric in metrics))
    return _table(["", *columns], [[split, *(_cell(m.get(c, "")) for c in columns)] for split, m in rows.items()])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _table(header: list[str], rows: list[list[str]]) -> str:
    escaped = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in (header, *rows)]
    lines = [escaped[0], ["---"] * len(header), *escaped[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


__all__ = ["Results", "render_model_card", "write_model_card"]
