"""Exports a Stack model as a stock architecture of transformers, for tools that know nothing of Stack."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stacklm_hf.modeling.configuration_stack import StackConfig
from stacklm_hf.modeling.folders import whole_folder
from stacklm_hf.modeling.modeling_stack import StackForCausalLM

logger = logging.getLogger(__name__)

_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_bias",
    "attention_dropout",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "dtype",
)


def export_qwen3(model: StackForCausalLM | str | os.PathLike[str], out_dir: str | os.PathLike[str]) -> Path:
    """Export a model that applies the rotary embedding in every layer as a stock `Qwen3ForCausalLM`.

    The two architectures then compute the same in float32; in half precision they differ by the rounding of the norms
    (Qwen3 scales after its cast, Stack before).

    Args:
        model: A model, or a folder or Hub name of one; of a folder, the tokenizer is taken along.
        out_dir: Folder to write: safetensors, config, generation config and the tokenizer. Files of the same names
            there are replaced.

    Returns:
        The folder.

    Raises:
        OSError: If there is no such model.
        ValueError: If it is not a Stack model, or does what Qwen3 cannot: layers without rotary embedding, or soft
            caps. The message says what to do instead. Nothing is written then.
    """
    tokenizer = None
    if not isinstance(model, StackForCausalLM):
        source = model
        try:
            found = AutoConfig.from_pretrained(source)
        except OSError as error:
            # Without a name in it, transformers' own message leaves a mistyped folder to be guessed.
            raise OSError(f"{source} is no checkpoint that can be loaded: {str(error).splitlines()[0]}") from error
        if not isinstance(found, StackConfig):
            raise ValueError(f"{source} is a {found.model_type} model: only Stack models are exported")
        model = StackForCausalLM.from_pretrained(source, dtype="auto")
        tokenizer = _tokenizer_of(source)
    config = qwen3_config(model.config)

    with torch.device("meta"):
        qwen3 = Qwen3ForCausalLM(config)
    qwen3.load_state_dict(model.state_dict(), assign=True)
    qwen3.tie_weights()
    qwen3.generation_config = GenerationConfig.from_dict(model.generation_config.to_dict())
    with whole_folder(Path(out_dir)) as folder:
        qwen3.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    logger.info("exported a Qwen3ForCausalLM to %s", out_dir)
    return Path(out_dir)


def qwen3_config(config: StackConfig) -> Qwen3Config:
    """Translate the configuration.

    Raises:
        ValueError: If Qwen3 cannot express it.
    """
    if config.nope_layers:
        raise ValueError(
            f"layers {', '.join(map(str, config.nope_layers))} have no rotary embedding, which Qwen3 cannot express: "
            "load the Stack checkpoint itself (trust_remote_code=True, or import stacklm_hf; vLLM with the package "
            "installed), or train with nope_every=0"
        )
    caps = [name for name in ("final_logit_softcapping", "attn_logit_softcapping") if getattr(config, name) is not None]
    if caps:
        raise ValueError(
            f"{' and '.join(caps)} cannot be expressed in Qwen3: load the Stack checkpoint itself "
            "(trust_remote_code=True, or import stacklm_hf), or train without soft caps"
        )
    return Qwen3Config(**{name: getattr(config, name) for name in _SHARED})


def _tokenizer_of(source: str | os.PathLike[str]) -> PreTrainedTokenizerBase | None:
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):
        logger.warning("no tokenizer in %s: the export has none either", source)
        return None


__all__ = ["export_qwen3", "qwen3_config"]
