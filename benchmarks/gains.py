"""Measure what `kprof ab --swap auto` gains on scripts of public repositories, unmodified.

    python benchmarks/gains.py FOLDER [ROW ...] --result gains_<gpu>_<yyyy-mm>.json

FOLDER holds the repositories that `ROWS` names, or the files of them that a row runs:

    nanoGPT, llama2.c, llm.c   of karpathy
    transformers               examples/pytorch of huggingface/transformers
    trl                        trl/scripts of huggingface/trl
    peft                       examples of huggingface/peft
    stable-fast                examples of chengzeyi/stable-fast

Configurations are those of the published models, weights are random, data is generated; nothing is
downloaded. Rows of Hugging Face need datasets, evaluate, accelerate, peft, trl and diffusers.

A row of eager code is one call of `kprof ab --swap auto`, which knows nothing of the script. Its
variants are the same script with the argument that compiles it or uses Liger. They are compared
with themselves with the kernels that the eager row chose, where these have a call; without one,
their own time is taken. The last row, NAME_rivals, is the fastest of the rivals over the fastest
of kprof's. Ratios are of step times, original over swapped; an interval is the comparison's own.

A row that the result has already, by the same code, is not measured again; --again measures it.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from evidence import RESULTS, describe_gpu, named_after, row, stale, write_evidence

ROOT = Path(__file__).resolve().parent.parent
# Hugging Face takes `kernels.py` of this folder for a package of that name.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT / "benchmarks"]
TOKENS = 4_000_000
SEED = 7
# Modules that scripts import for text or compilers that a row does not use, by folder. They are
# written even where the package is there: it may need files of the network.
TIKTOKEN = "class get_encoding:\n    def __init__(self, name):\n        pass\n"
STUBS = {
    "nanoGPT": {},
    "llm.c": {"tiktoken.py": TIKTOKEN},
    "llama2.c": {
        "sentencepiece.py": "class SentencePieceProcessor:\n    pass\n",
        "requests.py": "",
        "tqdm.py": "def tqdm(*args, **named):\n    pass\n",
    },
    "stable-fast": {
        "examples/sfast/__init__.py": "",
        "examples/sfast/compilers/__init__.py": "",
        "examples/sfast/compilers/diffusion_pipeline_compiler.py": (
            "compile = CompilationConfig = None\n"
        ),
    },
}
# A metric that `evaluate` finds by its name in the current folder. No row evaluates.
METRIC = """import datasets
import evaluate


class Unused(evaluate.Metric):
    def _info(self):
        kind = datasets.Value("int32")
        features = datasets.Features({"predictions": kind, "references": kind})
        return evaluate.MetricInfo(description="", citation="", features=features)
"""


METRICS = {f"{name}/{name}.py": METRIC for name in ("accuracy", "sacrebleu")}


def nano_gpt(folder, spec):
    """Write random tokens as nanoGPT reads them."""
    data = folder / "data" / "generated"
    data.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        tokens(50_257).tofile(data / f"{name}.bin")


def llama2_c(folder, spec):
    """Write random tokens as llama2.c reads them."""
    data = folder / "data" / "TinyStories_all_data"
    data.mkdir(parents=True, exist_ok=True)
    for name in ("data00", "data01"):
        tokens(32_000).tofile(data / f"{name}.bin")


def llm_c(folder, spec):
    """Write random tokens as llm.c reads them."""
    header = np.zeros(256, np.int32)
    header[:3] = 20_240_520, 1, TOKENS
    with (folder / "generated.bin").open("wb") as file:
        header.tofile(file)
        tokens(50_257).tofile(file)


def tokens(vocabulary):
    """Return random tokens."""
    return np.random.default_rng(SEED).integers(0, vocabulary, TOKENS).astype(np.uint16)


def language_model(folder, spec):
    """Write a configuration, or random weights with `weights`, a tokenizer and text of its words.

    A word is a token, so that all tokens of the vocabulary occur.
    """
    import transformers

    spec = dict(spec)
    weights, length = spec.pop("weights", None), spec.pop("words_per_line", 1000)
    config = transformers.AutoConfig.for_model(**spec)
    vocabulary = _tokenizer(folder / "tokenizer", config.vocab_size)
    if weights:
        _tokenizer(folder / "model", config.vocab_size)
        _save(getattr(transformers, weights), config, folder / "model")
    else:
        config.save_pretrained(folder / "model")
    lines = [" ".join(line) for line in _words(vocabulary, length, 800)]
    (folder / "train.txt").write_text("\n".join(lines))
    (folder / "validation.txt").write_text("\n".join(lines[:4]))
    (folder / "text").mkdir(exist_ok=True)
    told = [{"text": line, "instruction": line[:100], "output": line} for line in lines]
    rows = [json.dumps(one) for one in told]
    (folder / "text" / "train.jsonl").write_text("\n".join(rows))
    pairs = zip(lines, reversed(lines), strict=True)
    told = [json.dumps({"translation": {"en": en, "de": de}}) for en, de in pairs]
    (folder / "train.json").write_text("\n".join(told))


def _words(vocabulary, length, number):
    drawn = random.Random(SEED)
    return [drawn.choices(vocabulary, k=length) for _ in range(number)]


def _tokenizer(folder, vocabulary):
    """Write a tokenizer of as many words, and return those that are no special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ("pad_token", "eos_token", "unk_token", "cls_token", "sep_token", "mask_token")
    names = [f"[{name[:3].upper()}]" for name in special]
    words = [f"w{number}" for number in range(vocabulary - len(names))]
    ids = {word: number for number, word in enumerate([*names, *words])}
    made = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="$A [EOS]", special_tokens=[("[EOS]", ids["[EOS]"])]
    )
    named = dict(zip(special, names, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=100_000, **named)
    # Trainers of dialogues ask for a template.
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    return words


def _save(kind, config, folder):
    """Save a model with random weights, made on the GPU where there is one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    with torch.device(device):
        model = kind(config)
    model.to(getattr(config, "dtype", None) or torch.float32).save_pretrained(folder)


def image_model(folder, spec):
    """Write a vision model with random weights, its image processor and images of noise."""
    import transformers
    from PIL import Image

    spec = dict(spec)
    config = transformers.AutoConfig.for_model(**spec, num_labels=10)
    _save(transformers.AutoModelForImageClassification.from_config, config, folder / "model")
    size = config.image_size
    named = {"height": size, "width": size}
    transformers.ViTImageProcessor(size=named).save_pretrained(folder / "model")
    drawn = np.random.default_rng(SEED)
    for label in range(10):
        images = folder / "images" / f"class{label}"
        images.mkdir(parents=True, exist_ok=True)
        for number in range(60):
            pixels = drawn.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(images / f"{number}.jpg")


def diffusion(folder, spec):
    """Write a pipeline of Stable Diffusion with random weights."""
    import torch
    import transformers
    from diffusers import (
        AutoencoderKL,
        EulerDiscreteScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )

    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = [chr(code) for code in range(33, 127)]
    names = [*words, *(f"{word}</w>" for word in words), "<|startoftext|>", "<|endoftext|>"]
    ids = {name: number for number, name in enumerate(names)}
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    torch.manual_seed(SEED)
    with torch.device(device):
        unet, vae = UNet2DConditionModel(**spec["unet"]), AutoencoderKL(**spec["vae"])
        ends = {"bos_token_id": len(ids) - 2, "eos_token_id": len(ids) - 1}
        text = transformers.CLIPTextConfig(**spec["text"], vocab_size=len(ids), **ends)
        encoder = transformers.CLIPTextModel(text)
    tokenizer = transformers.CLIPTokenizer(
        vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"), model_max_length=77
    )
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=EulerDiscreteScheduler(steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.to(torch.float16).save_pretrained(folder / "model")


@dataclass(frozen=True)
class Row:
    """A script, and how it is called."""

    folder: str
    prepare: object
    script: tuple[str, ...]
    """Script and arguments; {data} is the folder of what was generated."""
    spec: dict = field(default_factory=dict)
    """The model, for `prepare`."""
    tiny: dict = field(default_factory=dict)
    """Smaller values of it, and of arguments, which check a row without a GPU."""
    variants: dict = field(default_factory=dict)
    """Further arguments by variant: compiled, liger."""
    reach: float | None = None


NANO = (
    *("train.py", "--dataset=generated", "--eval_iters=1", "--eval_interval=1000000"),
    *("--gradient_accumulation_steps=1", "--max_iters=1000000", "--log_interval=100000"),
)
LLAMA_C = (
    *("train.py", "--batch_size=16", "--max_seq_len=1024", "--dim=768", "--n_layers=12"),
    *("--n_heads=12", "--n_kv_heads=12", "--gradient_accumulation_steps=1", "--eval_iters=1"),
    *("--eval_interval=1000000", "--max_iters=1000000", "--log_interval=100000"),
)
LLM_C = (
    *("train_gpt2.py", "--input_bin=generated.bin", "--model=d12", "--batch_size=12"),
    *("--sequence_length=1024", "--total_batch_size=12288", "--num_iterations=1000000"),
    *("--dtype=bfloat16", "--tensorcores=1", "--flash=1", "--write_tensors=0"),
    *("--overfit_single_batch=0", "--inference_only=0"),
)
# Arguments of Hugging Face's Trainer.
TRAINER = (
    *("--output_dir={data}/out", "--max_steps=1000000", "--save_strategy=no", "--report_to=none"),
    *("--logging_steps=1000000", "--disable_tqdm=True", "--dataloader_num_workers=4"),
    *("--dataloader_persistent_workers=True",),
)
CLM = (
    *("examples/pytorch/language-modeling/run_clm.py", "--do_train", *TRAINER),
    # Weights are loaded: the script draws those of a configuration on the CPU, for a minute.
    *("--model_name_or_path={data}/model", "--tokenizer_name={data}/tokenizer"),
    *("--train_file={data}/train.txt", "--validation_file={data}/validation.txt"),
    *("--block_size=2048", "--per_device_train_batch_size=4"),
)
SFT = (
    *("trl/scripts/sft.py", *TRAINER, "--model_name_or_path={data}/model"),
    *("--dataset_name={data}/text", "--dtype=bfloat16", "--bf16=True", "--use_peft"),
    *("--lora_r=16", "--lora_target_modules=all-linear", "--max_length=1024"),
    *("--gradient_checkpointing=False", "--per_device_train_batch_size=4"),
)
LORA = (
    *("examples/olora_finetuning/olora_finetuning.py", "--base_model={data}/model"),
    *("--data_path={data}/text", "--output_dir={data}/out", "--dtype=bfloat16"),
    *("--init_lora_weights=gaussian", "--lora_r=16", "--lora_target_modules=all-linear"),
    *("--batch_size=4", "--cutoff_len=1024", "--num_epochs=100000"),
    *("--eval_step=1000000", "--save_step=1000000"),
)
MLM = (
    *("examples/pytorch/language-modeling/run_mlm.py", "--do_train", *TRAINER),
    *("--config_name={data}/model", "--tokenizer_name={data}/tokenizer", "--bf16=True"),
    *("--train_file={data}/train.txt", "--validation_file={data}/validation.txt"),
    *("--max_seq_length=512", "--per_device_train_batch_size=32"),
)
IMAGES = (
    *("examples/pytorch/image-classification/run_image_classification.py", "--do_train"),
    *(*TRAINER, "--model_name_or_path={data}/model", "--train_dir={data}/images"),
    *("--remove_unused_columns=False", "--bf16=True", "--per_device_train_batch_size=64"),
    "--dataloader_num_workers=12",
)
TRANSLATION = (
    *("examples/pytorch/translation/run_translation.py", "--do_train", *TRAINER),
    *("--model_name_or_path={data}/model", "--train_file={data}/train.json"),
    *("--source_lang=en", "--target_lang=de", "--max_source_length=512"),
    *("--max_target_length=128", "--bf16=True", "--per_device_train_batch_size=32"),
)
STABLE = (
    *("examples/optimize_stable_diffusion_pipeline.py", "--model={data}/model"),
    *("--scheduler=EulerDiscreteScheduler", "--steps=900", "--warmups=1000000", "--batch=4"),
    *("--height=512", "--width=512"),
)
TORCH_COMPILE, LIGER = ("--torch_compile=True",), ("--use_liger_kernel=True",)
COMPILED = {"compiled": TORCH_COMPILE}
BOTH = {"compiled": TORCH_COMPILE, "liger": LIGER}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ON_CPU = {"--use_cpu": "True", "--per_device_train_batch_size": "2"}
ROWS = {
    "nanogpt": Row(
        *("nanoGPT", nano_gpt, (*NANO, "--compile=False")),
        variants={"compiled": ("--compile=True",)},
        tiny={"--n_layer": "2", "--n_embd": "64", "--n_head": "4", "--batch_size": "2"},
        reach=1.3,
    ),
    "llama2c": Row(
        *("llama2.c", llama2_c, (*LLAMA_C, "--compile=False")),
        variants={"compiled": ("--compile=True",)},
    ),
    "llmc": Row(
        *("llm.c", llm_c, (*LLM_C, "--compile=0")), variants={"compiled": ("--compile=1",)}
    ),
    "llama_1b": Row(
        *("transformers", language_model, (*CLM, "--dtype=bfloat16")),
        {
            "model_type": "llama",
            "weights": "LlamaForCausalLM",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
        tiny={**SMALL, **HEADS, **ON_CPU, "--block_size": "128"},
        variants=BOTH,
        reach=1.45,
    ),
    "qwen2_0_5b": Row(
        *("transformers", language_model, (*CLM, "--bf16=True", "--dtype=float32")),
        {
            "model_type": "qwen2",
            "weights": "Qwen2ForCausalLM",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151_936,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "dtype": "float32",
        },
        tiny={**SMALL, **HEADS, **ON_CPU, "--block_size": "128"},
        variants=BOTH,
        reach=1.35,
    ),
    "gemma2_lora": Row(
        *("peft", language_model, LORA),
        {
            "model_type": "gemma2",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256_000,
            "dtype": "bfloat16",
            "weights": "Gemma2ForCausalLM",
            "words_per_line": 1100,
        },
        tiny={**SMALL, **HEADS, "--cutoff_len": "128", "--batch_size": "2", "words_per_line": 140},
        reach=1.2,
    ),
    "gemma2_sft": Row(
        *("trl", language_model, SFT),
        {
            "model_type": "gemma2",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256_000,
            "dtype": "bfloat16",
            "weights": "Gemma2ForCausalLM",
            "words_per_line": 1100,
        },
        tiny={**SMALL, **HEADS, **ON_CPU, "--max_length": "128", "words_per_line": 140},
        variants=BOTH,
    ),
    "bert_large": Row(
        *("transformers", language_model, MLM),
        {
            "model_type": "bert",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 30_522,
            "dtype": "float32",
        },
        tiny={**SMALL, **ON_CPU, "--max_seq_length": "128", "num_attention_heads": 4},
        variants=COMPILED,
        reach=1.15,
    ),
    "vit_large": Row(
        *("transformers", image_model, IMAGES),
        {
            "model_type": "vit",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 224,
            "dtype": "float32",
        },
        tiny={**SMALL, **ON_CPU, "num_attention_heads": 4, "image_size": 32, "patch_size": 8},
        variants=COMPILED,
        reach=1.15,
    ),
    "t5_base": Row(
        *("transformers", language_model, TRANSLATION),
        {
            "model_type": "t5",
            "d_model": 768,
            "d_ff": 3072,
            "d_kv": 64,
            "num_layers": 12,
            "num_heads": 12,
            "vocab_size": 32_128,
            "decoder_start_token_id": 0,
            "weights": "T5ForConditionalGeneration",
            "words_per_line": 600,
            "dtype": "float32",
        },
        tiny={"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4, **ON_CPU},
        variants=COMPILED,
        reach=1.15,
    ),
    "qwen3_moe": Row(
        *("transformers", language_model, (*CLM, "--dtype=bfloat16")),
        {
            "model_type": "qwen3_moe",
            "weights": "Qwen3MoeForCausalLM",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151_936,
            "max_position_embeddings": 32_768,
            "norm_topk_prob": True,
            "dtype": "bfloat16",
        },
        tiny={
            **SMALL,
            **HEADS,
            **ON_CPU,
            "--block_size": "128",
            "moe_intermediate_size": 32,
            "num_experts": 8,
        },
        variants=BOTH,
        reach=1.3,
    ),
    "unet": Row(
        *("stable-fast", diffusion, (*STABLE, "--compiler=none")),
        {
            "unet": {"cross_attention_dim": 768, "sample_size": 64},
            "vae": {
                "block_out_channels": (128, 256, 512, 512),
                "layers_per_block": 2,
                "down_block_types": ("DownEncoderBlock2D",) * 4,
                "latent_channels": 4,
                "up_block_types": ("UpDecoderBlock2D",) * 4,
            },
            "text": {
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
            },
        },
        variants={"compiled": ("--compiler=compile",)},
        reach=1.15,
    ),
}


# Seconds of a choice, which is made anew in each row.
BUDGET_S = 60


def main():
    """Measure the rows named, or all; write the result after each comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--pairs", type=int, default=60, help="at most, of each comparison")
    parser.add_argument("--variants", default="compiled,liger", help="those measured, or none")
    parser.add_argument("--losses", type=int, help="steps of training runs (L6) of eager rows")
    parser.add_argument("--again", action="store_true", help="measure rows of the result, too")
    parser.add_argument("--tiny", action="store_true", help="small models: checks the rows")
    parser.add_argument("--commit", help="of this code, where it is no clone")
    parser.add_argument("--result", type=Path, default=RESULTS / "gains_h100_2026-11.json")
    args = parser.parse_args()
    rows = [] if args.again else earlier(args.result)
    for name in args.rows or ROWS:
        for found in measured(name, args, {one["name"]: one for one in rows}):
            rows = [one for one in rows if one["name"] != found["name"]] + [found]
            print(json.dumps({**found, "tried": "…"}, indent=1), flush=True)
            sources = ("benchmarks/gains.py", "kprof/kernels/**/*.py", "kprof/ab/choose.py")
            what = "Step time of public scripts over that with the kernels of --swap auto."
            write_evidence(args.result, what, rows, sources, commit=args.commit)


def earlier(path):
    """Return the rows of a result that today's code made on this GPU."""
    path = named_after(describe_gpu()["gpu"], path)
    if not path.exists():
        return []
    told = json.loads(path.read_text())
    return [] if stale(told) or told["gpu"] != describe_gpu()["gpu"] else told["rows"]


def measured(name, args, known):
    """Yield a row and those of its variants that are not known yet."""
    one, steps = ROWS[name], dict(known)
    folder = args.folder.resolve() / one.folder
    data = prepared(name, one, folder, is_tiny=args.tiny)
    script = tuple(word.format(data=data) for word in one.script)
    if args.tiny:
        script += tuple(f"{key}={value}" for key, value in one.tiny.items() if key[0] == "-")
    wanted = [key for key in one.variants if key in args.variants.split(",")]
    for key in (None, *wanted):
        label = name if key is None else f"{name}_{key}"
        if label in steps:
            continue
        chosen = "auto" if key is None else steps[name].get("chosen")
        words = script if key is None else (*script, *one.variants[key])
        losses = ("--losses", str(args.losses)) if args.losses and key is None else ()
        told = swapped_or_not(folder, words, chosen, args.pairs, losses)
        reach = one.reach if key is None else None
        steps[label] = row(label, told.pop("speedup"), "x", "higher", reach, **told)
        yield steps[label]
    if wanted:
        yield against_rivals(name, [steps[name], *(steps[f"{name}_{key}"] for key in wanted)])


def swapped_or_not(folder, script, kernels, pairs, more=()):
    """Return what `kprof ab` says of a script with these kernels, or its step time without."""
    anew = ("--budget", str(BUDGET_S)) if kernels == "auto" else ()
    told = compared(folder, script, ("--swap", kernels, *anew, *more), pairs) if kernels else {}
    if told.get("a_ms"):
        return told
    why = told.get("problem", "no kernels were chosen")
    same = compared(folder, script, ("--fixed", "--patch", "contextlib:nullcontext"), 8)
    return {**same, "speedup": None, "why_not_swapped": why, "tried": told.get("tried", [])}


def prepared(name, one, folder, *, is_tiny):
    """Return the folder with the model and the data of a row; generate what is not there."""
    spec = {**one.spec, **({k: v for k, v in one.tiny.items() if k[0] != "-"} if is_tiny else {})}
    for file, text in STUBS.get(one.folder, METRICS).items():
        _write(folder / file, text)
    data = folder / "generated" / name
    data.mkdir(parents=True, exist_ok=True)
    marker, made = data / "made_of.json", json.dumps(spec, sort_keys=True)
    if not marker.exists() or marker.read_text() != made:
        one.prepare(data if one.spec else folder, spec)
        marker.write_text(made)
    return data


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def compared(folder, script, change, pairs):
    """Return what `kprof ab` says of a script and a change of it."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "ab"
        command = [sys.executable, "-m", "kprof", "ab", "--json", "--out", str(out), *change]
        command += ["--pairs", str(pairs), *script]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
        environment = {**os.environ, **offline, "PYTHONPATH": path}
        printed, said = streamed(command, cwd=folder, env=environment)
        words = " ".join(script).replace(str(folder), folder.name)
        choice = out / "choice.json"
        told = json.loads(choice.read_text()) if choice.exists() else {"tried": []}
        kept = ("name", "ratio", "low", "high", "why", "is_joined", "instead_of", "gate")
        tried = [{key: one[key] for key in kept if one.get(key)} for one in told["tried"]]
        found = {"script": words, "seconds": round(time.monotonic() - began_s, 1)}
        if told.get("joint"):
            found["joint"] = {key: told["joint"][key] for key in ("ratio", "low", "high")}
        if not printed:
            logs = sorted(out.rglob("*.log"), key=lambda path: path.stat().st_mtime)
            last = logs[-1].read_text(errors="replace")[-3000:] if logs else ""
            print(last, flush=True)
            return {"speedup": None, "problem": said[-600:], "tried": tried, **found}
    return {**_told(json.loads(printed), tried), **found}


def streamed(command, **options):
    """Run a command, print its messages as they come, and return its output and messages."""
    began_s, said = time.monotonic(), []
    with tempfile.TemporaryFile("w+") as output:
        ran = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True, **options)
        for line in ran.stderr:
            print(f"{time.monotonic() - began_s:5.0f} s  {line}", end="", flush=True)
            said.append(line)
        ran.wait()
        output.seek(0)
        return output.read(), "".join(said)


def _told(told, tried):
    claim = told["claims"][0]
    interval = claim.get("interval") or {}
    is_swap = told["b"].startswith("--swap ")
    return {
        "speedup": 1 / interval["ratio"] if interval else None,
        "low": 1 / interval["high"] if interval else None,
        "high": 1 / interval["low"] if interval else None,
        "a_ms": _step_ms(told, "a"),
        "b_ms": _step_ms(told, "b") if is_swap else None,
        "verdict": claim["verdict"],
        "num_pairs": claim["num_pairs"],
        "b": told["b"],
        "chosen": told["b"].removeprefix("--swap ").partition(", chosen")[0] if is_swap else None,
        "tried": tried,
        **losses_in(told.get("gates", ())),
    }


def losses_in(gates):
    """Return what training runs showed, level L6 with its measures; nothing where none was."""
    training = next((one for one in gates if one["asked"] == ["L6"]), None)
    if training is None:
        return {}
    (level,) = [one for one in training["levels"] if one["name"] == "L6"]
    kept = ("name", "value", "threshold", "baseline")
    measures = [{key: one[key] for key in kept} for one in level["measures"]]
    told = {key: level[key] for key in ("state", "why", "looked_at")}
    return {"losses": {**told, "measures": measures}}


def _step_ms(told, arm):
    return statistics.median(time_ns for pair in told["pairs"] for time_ns in pair[arm]) / 1e6


def against_rivals(name, rows):
    """Return the row of the fastest rival over the fastest of what kprof offers.

    Rivals are the compiled script and the one with Liger, as they are.
    """
    ours = {one["name"]: one.get("b_ms") for one in rows}
    theirs = {one["name"]: one.get("a_ms") for one in rows[1:]}
    best, rival = (
        min(((ms, key) for key, ms in side.items() if ms), default=None) for side in (ours, theirs)
    )
    speedup = rival[0] / best[0] if best and rival else None
    return row(
        *(f"{name}_rivals", speedup, "x", "higher", 1.05),
        ours=best[1] if best else None,
        rival=rival[1] if rival else None,
    )


if __name__ == "__main__":
    main()
