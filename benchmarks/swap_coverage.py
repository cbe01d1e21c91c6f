"""Write docs/coverage.md: the operations that a swap replaces in architectures of transformers.

python benchmarks/swap_coverage.py [ARCHITECTURE ...]

Each architecture is a small model with random weights in bfloat16. It takes one training step on a
CPU within a swap of `linear_cross_entropy`, which may take the place of `cross_entropy`, and one
within a swap of every other kernel. A call that is left to the original only because its tensors
are on no GPU counts as replaced. With names, it prints the sites of these, and writes nothing.
"""

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
# Hugging Face takes `kernels.py` of this folder for a package of that name.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT / "benchmarks"]
PAGE = ROOT / "docs" / "coverage.md"
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "num_key_value_heads": 2,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "head_dim": 32,
}
OF_T5 = {
    "d_model": 128,
    "d_ff": 256,
    "d_kv": 64,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
OF_BART = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
# Sizes that differ, by architecture; None: the configuration has no such size.
ARCHITECTURES = {
    "bart": OF_BART,
    "bert": {},
    "bloom": {"n_layer": 2, "n_head": 2},
    "cohere": {},
    "cohere2": {},
    "deepseek_v3": LATENT,
    "falcon": {"head_dim": None},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "glm": {},
    "glm4": {},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 2},
    "gpt_neox": {},
    "gpt_oss": LOCAL,
    "gptj": {"n_embd": 128, "n_layer": 2, "n_head": 2, "rotary_dim": 32},
    "granite": {},
    "granitemoe": LOCAL,
    "llama": {},
    "llama4_text": {**LOCAL, "intermediate_size_mlp": 256},
    "mistral": {},
    "mixtral": LOCAL,
    "modernbert": {},
    "nemotron": {},
    "olmo2": {},
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "roberta": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "t5": OF_T5,
    "vit": {"image_size": 32, "patch_size": 8},
}
CLASSES = {
    **dict.fromkeys(("bert", "roberta", "modernbert"), "AutoModelForMaskedLM"),
    **dict.fromkeys(("bart", "t5"), "AutoModelForSeq2SeqLM"),
    "vit": "AutoModelForImageClassification",
}
HEAD = "linear_cross_entropy"
# Kernels by column of the table.
COLUMNS = {
    "linear layer and loss": (HEAD,),
    "loss": ("cross_entropy",),
    "norms": ("rmsnorm", "layernorm"),
    "sum and norm": ("add_rmsnorm", "add_layernorm"),
    "rotation": ("rope",),
    "gated MLP": ("swiglu", "geglu"),
    "activation": ("gelu", "relu_squared"),
    "bias and GELU": ("bias_gelu",),
    "experts": ("moe_experts",),
    "attention": ("attention_forward",),
}
# No measurement on this machine chooses a provider of attention.
NAMES = {"attention_forward": "attention_forward=kprof"}
YES, NONE = "yes", "-"
TOP = """# Coverage: operations that a swap replaces in transformers

The table is written by `python benchmarks/swap_coverage.py`, by transformers {version}. Each
architecture takes one training step in bfloat16 with random weights and small sizes, with heads of
64 where it has a choice, and without dropout. *yes*: all calls of the operation are replaced on a
GPU. A letter is the reason why calls run the original, *yes, a* why some do. A dash: the model
has no call that kprof knows, or it has the operation in code that kprof does not find.
[The swap](swap.md) tells how sites are recognised, and under which conditions calls are replaced.

"""


def main():
    """Write the page, or print the sites of the architectures named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.architectures:
        for name in args.architectures:
            for one in sites_of(name):
                print(name, one.name, one.kernel, one.what, one.skipped or one.calls, sep=" | ")
        return
    import transformers

    transformers.utils.logging.set_verbosity_error()
    found = {name: cells_of(sites_of(name)) for name in ARCHITECTURES}
    PAGE.write_text(TOP.format(version=transformers.__version__) + table_of(found))


def sites_of(name):
    """Return the reports of all sites of a model after a step of training."""
    import transformers

    import kprof

    known = transformers.AutoConfig.for_model(name)
    sizes = {**SIZES, **ARCHITECTURES[name]}
    sizes = {key: value for key, value in sizes.items() if value is not None}
    dropouts = [key for key, value in vars(known).items() if "drop" in key and _is_rate(value)]
    config = transformers.AutoConfig.for_model(name, **{**sizes, **dict.fromkeys(dropouts, 0.0)})
    torch.manual_seed(0)
    cls = getattr(transformers, CLASSES.get(name, "AutoModelForCausalLM"))
    model = cls.from_config(config).to(torch.bfloat16).train()
    ids = torch.arange(16).view(1, 16) + 5
    given = {"input_ids": ids, "labels": ids}
    if name == "vit":
        pixels = torch.randn(2, 3, 32, 32).to(torch.bfloat16)
        given = {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    names = [NAMES.get(one, one) for kernels in COLUMNS.values() for one in kernels]
    sites = []
    for part in ([HEAD], [one for one in names if one != HEAD]):
        with kprof.swapped(model, *part) as swap:
            model(**given).loss.backward()
        sites += swap.report.sites
    return sites


def _is_rate(value):
    return isinstance(value, float) and 0 < value < 1


def cells_of(sites):
    """Return of each column whether all calls are replaced, and the reasons of those that are not.

    A site that was never called counts only if it was skipped.
    """
    from kprof.kernels.swap.providers import NEEDS_GPU

    cells = {}
    for column, kernels in COLUMNS.items():
        outcomes = Counter()
        for site in sites:
            if site.kernel in kernels:
                outcomes.update([site.skipped] if site.skipped else [one.why for one in site.calls])
        num_replaced = outcomes.pop(NEEDS_GPU, 0) + outcomes.pop(None, 0)
        cells[column] = (bool(num_replaced), [why for why, _ in outcomes.most_common()])
    return cells


def table_of(found):
    """Return the table, and the reasons by letter."""
    reasons = []
    for cells in found.values():
        for _, whys in cells.values():
            reasons += [why for why in whys if why not in reasons]
    letters = {why: _letter(number) for number, why in enumerate(reasons)}
    lines = [f"| architecture | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name, cells in found.items():
        row = [
            _cell(is_replaced, [letters[why] for why in whys])
            for is_replaced, whys in cells.values()
        ]
        lines.append(f"| {name} | {' | '.join(row)} |")
    told = [f"- {letter}: {why}" for why, letter in letters.items()]
    return "\n".join([*lines, "", *told, ""])


def _cell(is_replaced, letters):
    parts = [*([YES] if is_replaced else []), *letters]
    return ", ".join(parts) or NONE


def _letter(number):
    return chr(ord("a") + number) if number < 26 else f"a{_letter(number - 26)}"


if __name__ == "__main__":
    main()
