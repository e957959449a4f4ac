"""The config.json of Llama and its relatives, read and written: what would change a result is a field, or refused."""

import math
from collections.abc import Mapping
from typing import Any

import jax

from mlax import nn, ops
from mlax.core import Zeros, fields_of
from mlax.zoo._config import Config

CLASSES = {  # by model_type
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
GEMMA = ("gemma", "gemma2", "gemma3_text")
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": ops.gelu, "relu": jax.nn.relu}
LOCAL, FULL = "sliding_attention", "full_attention"
ROTARY_NAMES = frozenset(  # of everything that a supported rotary embedding may depend on
    ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast")
    + ("beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor")
    + ("partial_rotary_factor",)
)


def read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the Llama that a config.json describes."""
    family = config.get("model_type")
    if family not in CLASSES:
        raise ValueError(f"llama: model_type is {str(family)[:80]!r}, but must be one of {', '.join(CLASSES)}.")
    fields = Config(family, config)
    fields.require("quantization_config", None, default=None)  # its weights have other names and layouts
    fields.require("attention_dropout", 0.0, 0, None, default=0.0)
    heads, width = fields.size("num_attention_heads"), fields.size("hidden_size")
    kv_heads = _optional(fields.size, "num_key_value_heads")
    needs_head = family == "qwen3" or family in GEMMA
    head = fields.size("head_dim") if needs_head else _optional(fields.size, "head_dim") or width // heads
    common = {
        "family": family,
        "vocabulary": fields.size("vocab_size"),
        "positions": fields.size("max_position_embeddings"),
        "width": width,
        "hidden": fields.size("intermediate_size"),
        "depth": _depth(fields),
        "heads": heads,
        "kv_heads": None if kv_heads == heads else kv_heads,
        "head_width": None if head * heads == width else head,
        "rotary": _read_rotary(fields, _flat_rope(fields), head),
        "activation": _read_activation(fields),
        "norms": nn.RMSNorm(eps=_positive(fields, "rms_norm_eps", 1e-5 if family in ("mixtral", "phi3") else 1e-6)),
        "tied": fields.flag("tie_word_embeddings", family in GEMMA),
        "padding": _read_padding(fields),
    }
    return common | _read_variations(family, fields, head)


def _read_variations(family: str, fields: Config, head: int) -> dict[str, Any]:
    """The fields that not all families have."""
    match family:
        case "llama":
            fields.require("mlp_bias", False, default=False)
            return _read_biases(fields)
        case "mistral":
            return _read_window(fields, default=4096)
        case "qwen2":
            return {"bias": True} | _read_qwen_windows(fields)
        case "qwen3":
            return {"qk_norm": True} | _read_biases(fields) | _read_qwen_windows(fields)
        case "mixtral":
            fields.require("router_jitter_noise", 0.0, 0, default=0.0)
            experts, chosen = fields.size("num_local_experts", 8), fields.size("num_experts_per_tok", 2)
            if not 2 <= chosen <= experts:  # the gate of a single one would be 1 there, and its probability here
                raise ValueError(f"mixtral: num_experts_per_tok is {chosen}, but must be from 2 to {experts}.")
            return _read_window(fields) | {"experts": (experts, chosen)}
        case "phi3":
            for name in ("resid_pdrop", "embd_pdrop"):
                fields.require(name, 0.0, 0, default=0.0)
            return _read_window(fields)
        case _:
            return _read_gemma(family, fields, head)


def _read_gemma(family: str, fields: Config, head: int) -> dict[str, Any]:
    fields.require("use_bidirectional_attention", False, None, default=None)
    norms = nn.RMSNorm(eps=_positive(fields, "rms_norm_eps", 1e-6), scale_offset=1.0, scale_init=Zeros())
    gemma = {"norms": norms, "scaled_embed": True} | _read_biases(fields)
    if family == "gemma":
        return gemma
    scalar = _positive(fields, "query_pre_attn_scalar", 256.0)
    gemma |= {
        "post_norms": True,
        "scale": None if scalar == head else scalar**-0.5,
        "logit_softcap": _cap(fields, "final_logit_softcapping", 30.0 if family == "gemma2" else None),
    }
    if family == "gemma2":
        windows = _read_windows(fields, [FULL if layer % 2 else LOCAL for layer in range(_depth(fields))])
        return gemma | windows | {"softcap": _cap(fields, "attn_logit_softcapping", 50.0)}
    fields.require("attn_logit_softcapping", None, default=None)
    name = "sliding_window_pattern" if "sliding_window_pattern" in fields.fields else "_sliding_window_pattern"
    pattern = fields.size(name, 6)
    windows = _read_windows(fields, [LOCAL if (layer + 1) % pattern else FULL for layer in range(_depth(fields))])
    rope, local_rope = _layer_ropes(fields)
    rotary, local_rotary = (_read_rotary(fields, each, head) for each in (rope, local_rope))
    both = {"rotary": rotary, "local_rotary": None if local_rotary == rotary else local_rotary}
    return gemma | windows | both | {"qk_norm": True}


def _read_biases(fields: Config) -> dict[str, bool]:
    bias = fields.flag("attention_bias", False)
    return {"bias": bias, "out_bias": bias}


def _read_activation(fields: Config) -> Any:
    if fields.family not in GEMMA:
        return fields.choice("hidden_act", {**ACTIVATIONS, "swish": jax.nn.silu}, "silu")
    if fields.family == "gemma":  # "gelu" in its config.json has always been computed by tanh
        names = {"gelu": ops.gelu, "gelu_pytorch_tanh": ops.gelu}
        fields.choice("hidden_activation", names, "gelu_pytorch_tanh")
        return fields.choice("hidden_act", names, "gelu_pytorch_tanh")
    return fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")


def _read_padding(fields: Config) -> int | None:
    padding, vocabulary = fields.fields.get("pad_token_id"), fields.size("vocab_size")
    if padding is None:
        return None
    if isinstance(padding, bool) or not isinstance(padding, int) or not -vocabulary <= padding < vocabulary:
        raise ValueError(
            f"{fields.family}: pad_token_id is {str(padding)[:80]}, but must be a token from 0 to {vocabulary - 1}, "
            "or null."
        )
    return padding % vocabulary  # as in PyTorch, a negative index counts from the end


def _depth(fields: Config) -> int:
    return fields.size("num_hidden_layers")


def _read_window(fields: Config, default: int | None = None) -> dict[str, Any]:
    """The same window for all layers."""
    has_window = fields.fields.get("sliding_window", default) is not None
    return {"windows": (fields.size("sliding_window", default) if has_window else None,)}


def _read_qwen_windows(fields: Config) -> dict[str, Any]:
    if not fields.flag("use_sliding_window", False):
        return {}
    first = fields.fields.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise ValueError(f"{fields.family}: max_window_layers is {str(first)[:80]}, but must be an integer.")
    return _read_windows(fields, [FULL if layer < first else LOCAL for layer in range(_depth(fields))])


def _read_windows(fields: Config, default: list[str]) -> dict[str, Any]:
    """The windows by the type of each layer, as the shortest pattern that repeats."""
    types = fields.fields.get("layer_types")
    types = default if types is None else types
    if not isinstance(types, list) or len(types) != _depth(fields) or not all(each in (LOCAL, FULL) for each in types):
        raise ValueError(
            f"{fields.family}: layer_types is {str(types)[:80]}, but must be a list of {_depth(fields)}, each "
            f"{LOCAL!r} or {FULL!r}."
        )
    window = _read_window(fields, default=4096)["windows"][0]
    windows = [window if each == LOCAL else None for each in types]
    lengths = range(1, len(windows) + 1)
    repeats = (length for length in lengths if windows[length:] == windows[:-length])
    return {"windows": tuple(windows[: next(repeats)])}


def _flat_rope(fields: Config) -> dict[str, Any]:
    """The parameters of the rotary embedding of all layers: rope_parameters or, in older files, rope_scaling."""
    rope = fields.fields.get("rope_scaling") or fields.fields.get("rope_parameters") or {}
    if fields.family == "gemma3_text":
        return {}
    default = 1_000_000.0 if fields.family == "mixtral" else 10_000.0
    above = {"rope_theta": fields.number("rope_theta", default)}
    if fields.fields.get("partial_rotary_factor") is not None:
        above["partial_rotary_factor"] = fields.number("partial_rotary_factor")
    return above | _rope(fields, rope)


def _layer_ropes(fields: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of Gemma 3's rotary embeddings: of layers with full attention, and of those with a window."""
    nested = _rope(fields, fields.fields.get("rope_parameters") or {}, (FULL, LOCAL))
    full, local = (_rope(fields, nested.get(name) or {}) for name in (FULL, LOCAL))
    full |= _rope(fields, fields.fields.get("rope_scaling") or {})
    theta = fields.number("rope_theta", 1_000_000.0)
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    return {"rope_theta": theta, **full}, {"rope_theta": local_theta, **local}


def _rope(fields: Config, rope: Any, names: Any = ROTARY_NAMES) -> dict[str, Any]:
    if not isinstance(rope, Mapping):
        raise ValueError(f"{fields.family}: the rotary parameters are {type(rope).__name__}, but must be a dict.")
    unknown = sorted(str(name)[:80] for name in rope if name not in names)
    if unknown:
        raise ValueError(f"{fields.family}: {', '.join(unknown[:8])} of the rotary parameters are not supported.")
    return dict(rope)


def _read_rotary(fields: Config, rope: dict[str, Any], head: int) -> nn.Rotary:
    read = Config(f"{fields.family}: rotary parameters", rope)
    share = read.number("partial_rotary_factor", 1.0)
    if not (share == 1.0 or (fields.family == "phi3" and 0.0 < share <= 1.0)):
        raise ValueError(f"{fields.family}: partial_rotary_factor is {share}, but only 1.0 is supported.")
    width = None if share == 1.0 else int(head * share)
    return nn.Rotary(base=_above(read, "rope_theta", 1.0, 10_000.0), width=width, scaling=_read_scaling(fields, read))


def _read_scaling(fields: Config, rope: Config) -> Any:
    kind = rope.fields.get("rope_type", rope.fields.get("type", "default"))
    kinds = ("default",) if fields.family == "phi3" else ("default", "linear", "dynamic", "yarn", "llama3")
    if kind not in kinds:
        raise ValueError(f"{rope.family}: rope_type is {str(kind)[:80]!r}, but must be one of {', '.join(kinds)}.")
    if kind == "default":
        return None
    factor, positions = _positive(rope, "factor"), fields.size("max_position_embeddings")
    if kind == "linear":
        return nn.LinearScaling(factor)
    if kind == "dynamic":
        return nn.DynamicNTKScaling(factor, length=positions)
    trained = rope.size("original_max_position_embeddings", positions)
    length = fields.size("original_max_position_embeddings", trained)
    if kind == "llama3":
        low = _positive(rope, "low_freq_factor")
        return nn.Llama3Scaling(factor=factor, low=low, high=_above(rope, "high_freq_factor", low), length=length)
    rope.require("truncate", True, None, default=None)
    fast, slow = _positive(rope, "beta_fast", 32.0), _positive(rope, "beta_slow", 1.0)
    return nn.YaRNScaling(factor, length=length, fast=fast, slow=slow, attention_factor=_yarn_factor(rope, factor))


def _yarn_factor(rope: Config, factor: float) -> float | None:
    if rope.fields.get("attention_factor") is not None:
        return rope.number("attention_factor")
    scales = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if not all(scales):
        return None
    above, below = (0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0 for scale in scales)
    return above / below


def _optional(read: Any, name: str) -> Any:
    """A field by a method of Config, or None."""
    return None if read.__self__.fields.get(name) is None else read(name)


def _cap(fields: Config, name: str, default: float | None) -> float | None:
    return None if fields.fields.get(name, default) is None else _positive(fields, name, default)


def _positive(fields: Config, name: str, default: float | None = None) -> float:
    return _above(fields, name, 0.0, default)


def _above(fields: Config, name: str, bound: float, default: float | None = None) -> float:
    value = fields.number(name, default)
    if value <= bound:
        raise ValueError(f"{fields.family}: {name} is {value}, but must be above {bound:g}.")
    return value


def write_config(model: Any) -> dict[str, Any]:
    """The config.json of a Llama, whose names transformers 4 and 5 read."""
    head, windows = model.head_width or model.width // model.heads, _layer_windows(model)
    names = {activation: name for name, activation in ACTIVATIONS.items()}
    act = "hidden_activation" if model.family in ("gemma2", "gemma3_text") else "hidden_act"
    config = {
        "model_type": model.family,
        "architectures": [CLASSES[model.family]],
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.positions,
        "hidden_size": model.width,
        "intermediate_size": model.hidden,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": head,
        "rms_norm_eps": model.norms.eps,
        "tie_word_embeddings": model.tied,
        "pad_token_id": model.padding,
        act: names.get(model.activation, str(model.activation)),
        **_write_rope(model, head),
    }
    if model.family in ("mistral", "mixtral", "phi3"):
        config["sliding_window"] = windows[0]
    elif model.family not in ("llama", "gemma"):
        config["sliding_window"] = max((window or 0 for window in windows), default=0) or 4096
        config["layer_types"] = [FULL if window is None else LOCAL for window in windows]
    if model.family in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": any(windows), "max_window_layers": model.depth}
    if model.family in ("llama", "qwen3", *GEMMA):
        config["attention_bias"] = model.bias
    if model.family in ("gemma2", "gemma3_text"):
        scalar = head if model.scale is None else round(model.scale**-2)  # which must be an integer
        config |= {"query_pre_attn_scalar": scalar, "final_logit_softcapping": model.logit_softcap}
        config["attn_logit_softcapping"] = model.softcap
    if model.family == "mixtral":
        config["num_local_experts"], config["num_experts_per_tok"] = model.experts or (None, None)
    _check_written(model, config)
    return config


def _write_rope(model: Any, head: int) -> dict[str, Any]:
    """In the names of transformers 4, which 5 reads, too."""
    rope = {"rope_theta": model.rotary.base, "rope_scaling": _write_scaling(model.rotary.scaling)}
    if model.rotary.width is not None:
        rope["partial_rotary_factor"] = model.rotary.width / head
    if model.family == "gemma3_text":
        rope["rope_local_base_freq"] = (model.local_rotary or model.rotary).base
    return rope


def _write_scaling(scaling: Any) -> dict[str, Any] | None:
    match scaling:
        case nn.LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case nn.DynamicNTKScaling(factor):
            return {"rope_type": "dynamic", "factor": factor}
        case nn.Llama3Scaling():
            names = {"factor": scaling.factor, "low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
            return {"rope_type": "llama3", **names, "original_max_position_embeddings": scaling.length}
        case nn.YaRNScaling(factor):
            names = {"beta_fast": scaling.fast, "beta_slow": scaling.slow}
            names |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
            return {"rope_type": "yarn", "factor": factor, **names, "original_max_position_embeddings": scaling.length}
    return None


def _check_written(model: Any, config: dict[str, Any]) -> None:
    """Raise unless the config.json describes this model: a family has only some of the fields."""
    read = type(model)(**read_fields(config))
    ours, theirs = _settings(model), _settings(read)
    lost = [f"{name}={ours[name]!r}" for name in ours if ours[name] != theirs[name]]
    if lost:
        raise ValueError(
            f"Llama: the config.json of the family {model.family!r} has no {', '.join(lost)}; choose another family."
        )


def _settings(model: Any) -> dict[str, Any]:
    """All that a model computes, with None replaced by what it stands for."""
    head = model.head_width or model.width // model.heads
    settings = {name: value for name, value in fields_of(model).items() if name not in ("edits", "last_only")}
    return settings | {
        "kv_heads": model.kv_heads or model.heads,
        "head_width": head,
        "windows": _layer_windows(model),
        "local_rotary": (model.local_rotary or model.rotary) if any(_layer_windows(model)) else None,
        "scale": round((model.scale or head**-0.5) ** -2, 6),
        "norms": (model.norms.eps, model.norms.scale_offset),
    }


def _layer_windows(model: Any) -> list[int | None]:
    """The window of each layer."""
    return [model.windows[layer % len(model.windows)] for layer in range(model.depth)]
