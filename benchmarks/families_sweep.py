"""Are the residual writers read right in every architecture of transformers that builds from a small config?

    python -m benchmarks.families_sweep --out sweep.json [--models bert gpt2] [--seconds 40]

Each model is built and checked in a process of its own. `right`: the functional check of `anatomy.verify` agrees.
`refused`: one error. `wrong`: writers are named and the check disagrees. `unchecked`: named, but generic inputs do not
run it or do not reach a stack. `not built`: no small config.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import resource
import signal
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

OUTCOMES = ("right", "refused", "wrong", "unchecked", "not built")
WIDTHS = "hidden_size d_model n_embd embed_dim dim emb_dim hidden_dim embedding_size d_embed word_embed_proj_dim"
HEADS = (
    "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads encoder_layers_heads "
    "num_key_value_heads num_kv_heads attention_heads mamba_num_heads mamba_n_heads"
)
LAYERS = (
    "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers "
    "encoder_num_layers decoder_num_layers"
)
INNER = "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim d_inner ffn_hidden_size hidden_dim"
SIZES = {
    **dict.fromkeys(WIDTHS.split(), 32),
    **dict.fromkeys(HEADS.split(), 2),
    **dict.fromkeys(LAYERS.split(), 2),
    **dict.fromkeys(INNER.split(), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("vocab_size", "entity_vocab_size", "text_vocab_size"), 40),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "max_source_positions"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "attention_head_size"), 16),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_selected_experts"), 2),
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
    "rope_scaling": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "attention_dropout": 0.0,
    "layerdrop": 0.0,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
}
FREE = ("pos_att_type",)
ATTEMPTS = (
    {},
    {"num_hidden_layers": 4, "n_layer": 4},
    {"num_key_value_heads": 1},
    {"max_position_embeddings": None},
    {"head_dim": 8},
    {"image_size": 64, "patch_size": 4},
    {"q_lora_rank": None},
    {"head_dim": None, "v_head_dim": None},
    {"num_attention_heads": None, "num_heads": None, "num_key_value_heads": None, "head_dim": None, "v_head_dim": None},
    {"num_hidden_layers": None, "head_dim": None},
)


def small_config(kind: str, extra: dict[str, Any]) -> Any:
    """The configuration with every common size that it has made small."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[kind]
    own = config_class()
    sizes = {key: value for key, value in (SIZES | extra).items() if value is not None or key == "rope_scaling"}
    options = {name: sizes[name] for name in sizes if hasattr(own, name) and _is_size(name, getattr(own, name))}
    for name in ("text_config", "vision_config", "audio_config", "encoder_config", "decoder_config"):
        part = getattr(own, name, None)
        if part is not None and not isinstance(part, dict):
            inner = {k: sizes[k] for k in sizes if hasattr(part, k) and _is_size(k, getattr(part, k))}
            options[name] = part.to_dict() | inner
    return config_class(**options)


def _is_size(name: str, own: Any) -> bool:
    return name in FREE or not isinstance(own, list | tuple | dict | str)


def inputs_for(model: nn.Module, config: Any) -> Iterator[dict[str, Tensor]]:
    """Generic inputs in the names that the forward takes, most likely first."""
    names = set(inspect.signature(model.forward).parameters)
    generator = torch.Generator().manual_seed(3)
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 32)
    size = size if isinstance(size, int) else 32
    channels = getattr(config, "num_channels", 3)
    tokens = torch.randint(4, 30, (2, 8), generator=generator)
    pixels = torch.randn(2, channels if isinstance(channels, int) else 3, size, size, generator=generator)
    texts = (
        {"input_ids": tokens, "decoder_input_ids": tokens} if "decoder_input_ids" in names else {"input_ids": tokens}
    )
    if "input_ids" in names:
        yield texts
    for key in ("pixel_values", "pixel_values_videos"):
        if key in names:
            yield {key: pixels}
            if "input_ids" in names:
                yield {key: pixels, **texts}
            yield {key: torch.randn(1, 4, 3, size, size, generator=generator)}
            yield {key: torch.randn(2, 3, 64, 64, generator=generator)}
    if "input_values" in names:
        yield {"input_values": torch.randn(2, 4000, generator=generator)}
        yield {"input_values": torch.randn(2, 1024, 128, generator=generator)}
        yield {"input_values": torch.randn(2, 1, 4000, generator=generator)}
    if "input_features" in names:
        for shape in ((2, 80, 128), (2, 128, 80), (2, 80, 3000), (2, 3000, 80), (2, 64, 160), (2, 128, 128)):
            yield {"input_features": torch.randn(shape, generator=generator)} | (
                {"decoder_input_ids": tokens} if "decoder_input_ids" in names else {}
            )
    if "past_values" in names:
        length, count = getattr(config, "context_length", 32), getattr(config, "num_input_channels", 1)
        yield {"past_values": torch.randn(2, length, count, generator=generator)}
    if "inputs_embeds" in names:
        yield {"inputs_embeds": torch.randn(2, 8, 32, generator=generator)}


def outputs_of(output: Any) -> Tensor:
    """All floating tensors of an output in one vector."""
    return torch.cat([tensor.flatten().float() for tensor in _tensors(output)])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            if key not in ("past_key_values", "hidden_states", "attentions", "cache_params", "state"):
                yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def examine(kind: str) -> dict[str, Any]:
    """Build one architecture, read it, and check what was read."""
    model, config, why = _build(kind)
    if model is None:
        return {"outcome": "not built", "why": why}
    from lightning_norms.anatomy.verify import check_writers
    from lightning_norms.anatomy.writers import residual_writers

    facts: dict[str, Any] = {"model": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    try:
        writers = residual_writers(model)
    except ValueError as error:
        return facts | {"outcome": "refused", "why": str(error)}
    facts["writers"] = [matrix.name for matrix in writers]
    run, why = _runner(model, config)
    if run is None:
        return facts | {"outcome": "unchecked", "why": why}
    try:
        findings = check_writers(model, writers, run)
    except Exception as error:
        return facts | {"outcome": "unchecked", "why": f"check: {error!r}"[:300]}
    unused = [finding.name for finding in findings if finding.kind == "unused"]
    bad = [f"{f.kind} {f.name}" for f in findings if f.kind != "unused"]
    outcome = "wrong" if bad else "unchecked" if unused else "right"
    return facts | {"outcome": outcome, "why": "; ".join(bad[:12]) or ", ".join(f"unused {name}" for name in unused)}


def _build(kind: str) -> tuple[nn.Module | None, Any, str]:
    from transformers import AutoModel

    why = ""
    for extra in ATTEMPTS:
        try:
            config = small_config(kind, extra)
            with torch.device("meta"):
                count = sum(p.numel() for p in AutoModel.from_config(config).parameters())
            if count > 3e7:
                why = f"{count:,} parameters"
                continue
            torch.manual_seed(0)
            return AutoModel.from_config(config, attn_implementation="eager").eval().float(), config, ""
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:200]
    return None, None, why


def _runner(model: nn.Module, config: Any) -> tuple[Any, str]:
    why = "no generic input"
    for inputs in inputs_for(model, config):

        def run(inputs: dict[str, Tensor] = inputs) -> Tensor:
            torch.manual_seed(5)
            return outputs_of(model(**inputs))

        try:
            with torch.no_grad():
                if run().numel():
                    return run, ""
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:200]
    return None, why


def in_a_process(kind: str, seconds: int) -> dict[str, Any]:
    """`examine` in a fork, which a crash or the clock may end."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            signal.alarm(6 * seconds)
            os.nice(5)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                outcome = examine(kind)
            except BaseException:
                outcome = {"outcome": "unchecked", "why": traceback.format_exc()[-300:]}
            Path(answer.name).write_text(json.dumps(outcome))
            os._exit(0)
        os.waitpid(child, 0)
        text = answer.read()
    return json.loads(text) if text else {"outcome": "not built", "why": f"no answer within {seconds} s of computing"}


def table(results: dict[str, Any]) -> str:
    """Counts, and the architectures of every outcome, as Markdown."""
    tried = [kind for kind in results if results[kind]["outcome"] != "not built"]
    lines = [f"{len(tried)} architectures of transformers' AutoModel built from a small config.", ""]
    lines += ["| outcome | count | architectures |", "|---|---|---|"]
    for outcome in OUTCOMES:
        kinds = [kind for kind, result in sorted(results.items()) if result["outcome"] == outcome]
        lines.append(f"| {outcome} | {len(kinds)} | {', '.join(kinds)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Sweep, and write the results after every model."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("families_sweep.json"))
    parser.add_argument("--models", nargs="*", default=sorted(MODEL_MAPPING_NAMES))
    parser.add_argument("--seconds", type=int, default=40)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for kind in options.models:
        if kind not in results:
            results[kind] = in_a_process(kind, options.seconds)
            print(f"{kind:28} {results[kind]['outcome']:10} {results[kind].get('why', '')[:90]!r}", flush=True)
            options.out.write_text(json.dumps(results, indent=1))
            options.out.with_suffix(".md").write_text(table(results))
    print(Counter(result["outcome"] for result in results.values()))


if __name__ == "__main__":
    main()
