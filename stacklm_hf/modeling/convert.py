"""Imports checkpoints of the original PyTorch `Stack100M` into the Hugging Face format.

Contract: no code stored in a checkpoint is ever run; every tensor of the checkpoint has its place in the model and
every parameter of the model its tensor, else the error names those that have not; and the output folder is written
whole or not at all.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedTokenizerBase

from stacklm_hf.modeling.configuration_stack import StackConfig
from stacklm_hf.modeling.folders import whole_folder
from stacklm_hf.modeling.model_card import write_model_card
from stacklm_hf.modeling.modeling_stack import StackForCausalLM
from stacklm_hf.modeling.tokenization_stack import StackTokenizerFast, generation_defaults

logger = logging.getLogger(__name__)

_CONFIG_NAMES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "tie_embeddings": "tie_word_embeddings",
    "nope_every": "nope_every",
    "norm_eps": "rms_norm_eps",
    "z_loss_coef": "z_loss_coef",
    "logit_soft_cap": "final_logit_softcapping",
    "attn_soft_cap": "attn_logit_softcapping",
}
# Settings that change how the original trains, not what it computes.
_TRAINING_ONLY = frozenset({"loss_chunk"})
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_REFUSED = {"use_mla": "latent attention", "mtp_heads": "multi-token prediction heads"}

_TENSOR_NAMES = {
    "tok_emb.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_BLOCK_TENSOR_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn.wq.weight": "self_attn.q_proj.weight",
    "attn.wk.weight": "self_attn.k_proj.weight",
    "attn.wv.weight": "self_attn.v_proj.weight",
    "attn.wo.weight": "self_attn.o_proj.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def convert_native(
    checkpoint: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
) -> Path:
    """Convert a native checkpoint into a folder that `from_pretrained` loads.

    Args:
        checkpoint: File of a native state dict, alone or under "model" in a training checkpoint.
        out_dir: Folder to write: safetensors, config, generation config, the architecture's code, a model card, and
            the tokenizer where one is given. Files of the same names there are replaced.
        config: Native configuration, as a JSON file or a mapping. Where not given, the one that the training
            checkpoint holds, else that of Stack-100M.
        tokenizer: Native tokenizer file (`stacklm-bpe-v1`), or a tokenizer object.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If a given file does not exist.
        ValueError: If the checkpoint needs code to load or is damaged, its configuration asks for something this
            architecture does not have, a tensor is missing, unknown, misshaped or not finite, or the tokenizer does
            not fit the vocabulary. Nothing is written then.
    """
    loaded = _load(Path(checkpoint))
    state = _native_state(loaded, checkpoint)
    stack_config = native_config(_choose_config(config, loaded))
    tensors = _map_tensors(state, stack_config)
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer = StackTokenizerFast.from_native(tokenizer, model_max_length=stack_config.max_position_embeddings)
    if tokenizer is not None:
        if len(tokenizer) != stack_config.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens and the model {stack_config.vocab_size}: "
                "give the tokenizer that this checkpoint was trained with"
            )
        stack_config.update(generation_defaults(tokenizer))

    model = StackForCausalLM._from_config(stack_config, dtype=_common_dtype(tensors.values()))
    model.load_state_dict(tensors)
    with whole_folder(Path(out_dir)) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_model_card(folder, model.config, name=Path(out_dir).resolve().name)
    logger.info("converted %s to %s: %d parameters", checkpoint, out_dir, model.num_parameters())
    return Path(out_dir)


def native_config(native: Mapping[str, Any]) -> StackConfig:
    """Translate a native configuration.

    Args:
        native: The original's settings; those that are not there have Stack-100M's values.

    Raises:
        ValueError: If it asks for what this architecture does not have, or a value is out of range.
    """
    for key, what in _REFUSED.items():
        if native.get(key):
            raise ValueError(f"this checkpoint uses {what} ({key}={native[key]!r}), which Stack models do not have")
    if not native.get("qk_norm", True):
        raise ValueError("this checkpoint has no QK-norm (qk_norm=False), which every Stack model has")
    known = {*_CONFIG_NAMES, *_TRAINING_ONLY, *_REFUSED, "qk_norm"}
    # An unknown setting that is off changes nothing; one that is on may change every logit.
    unknown = sorted(key for key, value in native.items() if key not in known and value)
    if unknown:
        raise ValueError(
            f"unknown settings in the native config: {', '.join(unknown)}; remove those that no logit depends on"
        )
    translated = {ours: native[theirs] for theirs, ours in _CONFIG_NAMES.items() if theirs in native}
    try:
        return StackConfig(**translated)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(
            f"the native config does not describe a Stack model: {' '.join(str(error).split())}"
        ) from error


def _load(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with torch.serialization.safe_globals(_numpy_parts()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # damage shows as any exception, wherever the reader happens to be
        # torch's own message advises to load it all the same.
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise ValueError(
                f"{path} does not load without running code from it (it calls {found[1]}): "
                "save its state dict as tensors alone"
            ) from error
        raise ValueError(f"{path} is not a PyTorch checkpoint, or a damaged one: save or copy it again") from error


def _numpy_parts() -> list[Any]:
    """What pickled numpy arrays and numbers are made of: training checkpoints hold numpy's RNG state.

    All of it is plain data. The functions go by the module's name in numpy 1 and in numpy 2.
    """
    multiarray = np._core.multiarray  # type: ignore[attr-defined]  # numpy's stubs leave out where pickles point to
    functions = (multiarray._reconstruct, multiarray.scalar)
    codes = np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"
    return [
        np.ndarray,
        np.dtype,
        *{type(np.dtype(code)) for code in codes},
        *((f, f"numpy.{core}.multiarray.{f.__name__}") for f in functions for core in ("core", "_core")),
    ]


def _native_state(loaded: Any, checkpoint: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    state = loaded.get("model", loaded) if isinstance(loaded, Mapping) else None
    if not isinstance(state, Mapping) or not state:
        raise ValueError(f'{checkpoint} holds no state dict, neither alone nor under "model"')
    wrong = [str(n) for n, value in state.items() if not (isinstance(n, str) and isinstance(value, torch.Tensor))]
    if wrong:
        raise ValueError(f"{checkpoint} is no native state dict: not named tensors: {_listing(wrong)}")
    return dict(state)


def _choose_config(config: str | os.PathLike[str] | Mapping[str, Any] | None, loaded: Any) -> Mapping[str, Any]:
    """The given configuration, else the one a training checkpoint carries, else none (Stack-100M)."""
    extra = loaded.get("extra") if "model" in loaded else None
    carried = extra.get("config") if isinstance(extra, Mapping) else None
    if not isinstance(carried, Mapping):
        carried = {}
    if config is None:
        return carried
    if not isinstance(config, Mapping):
        path = Path(config)
        if not path.is_file():
            raise FileNotFoundError(f"no native config at {path}")
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(config, Mapping):
            raise ValueError(f"{path} does not hold a JSON object")
    differing = sorted(key for key in carried if key in config and carried[key] != config[key])
    if differing:
        logger.warning("the given config differs from the checkpoint's own in %s; the given one counts", differing)
    return config


def _map_tensors(state: dict[str, torch.Tensor], config: StackConfig) -> dict[str, torch.Tensor]:
    """Rename the native tensors, after checking that they are exactly those of the model.

    Raises:
        ValueError: If one is missing, unknown, misshaped, not of floating point or not finite; the message names
            them all.
    """
    names = dict(_TENSOR_NAMES)
    for i in range(config.num_hidden_layers):
        names.update({f"blocks.{i}.{n}": f"model.layers.{i}.{ours}" for n, ours in _BLOCK_TENSOR_NAMES.items()})
    if config.tie_word_embeddings and "tok_emb.weight" in state:
        state.setdefault("lm_head.weight", state["tok_emb.weight"])  # a tied head may be left out

    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in StackForCausalLM(config).state_dict().items()}
    problems = []
    if missing := [name for name in names if name not in state]:
        problems.append(f"missing: {_listing(missing)}")
    if extra := [name for name in state if name not in names]:
        problems.append(f"not part of a Stack model: {_listing(extra)}")
    shared = [name for name in names if name in state]
    if misshaped := [
        f"{name} has shape {tuple(state[name].shape)}, expected {shapes[names[name]]}"
        for name in shared
        if tuple(state[name].shape) != shapes[names[name]]
    ]:
        problems.append(f"wrong shape: {_listing(misshaped)}")
    if unfit := [name for name in shared if not _is_plain(state[name])]:
        problems.append(f"not dense and of 16, 32 or 64 bit floating point: {_listing(unfit)}")
    if infinite := [name for name in shared if name not in unfit and not state[name].isfinite().all()]:
        problems.append(f"holds NaN or infinity: {_listing(infinite)}")
    if problems:
        raise ValueError(f"the checkpoint does not fit its config; {'; '.join(problems)}")
    if config.tie_word_embeddings and not torch.equal(state["lm_head.weight"], state["tok_emb.weight"]):
        raise ValueError("lm_head.weight differs from tok_emb.weight: set tie_embeddings to false in the config")
    return {names[name]: tensor for name, tensor in state.items()}


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _DTYPES and tensor.layout == torch.strided and not tensor.is_meta


def _common_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The narrowest dtype that holds every tensor exactly."""
    dtypes = {tensor.dtype for tensor in tensors}
    first, *others = dtypes
    for other in others:
        first = torch.promote_types(first, other)
    return first


def _listing(names: list[str], limit: int = 12) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


__all__ = ["convert_native", "native_config"]
