"""Single blocks of Hugging Face models by drawn configurations, without weights from anywhere."""

import torch
import transformers

TEXT = (
    *("albert", "bert", "bloom", "cohere", "convbert", "deberta-v2", "distilbert", "electra"),
    *("ernie", "gemma", "gemma2", "gemma3_text", "glm", "gpt2", "gpt_neo", "gpt_neox"),
    *("granite", "helium", "llama", "mistral", "mixtral", "mpnet", "nemotron", "nystromformer"),
    *("olmo", "olmo2", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "roberta", "roformer", "smollm3", "squeezebert", "stablelm"),
    *("starcoder2", "xglm", "bart", "t5", "mbart", "pegasus", "blenderbot"),
)
IMAGE = (
    *("beit", "bit", "convnext", "convnextv2", "cvt", "deit", "dinov2", "efficientnet", "levit"),
    *("mobilenet_v1", "mobilenet_v2", "mobilevit", "poolformer", "pvt", "regnet", "resnet"),
    *("segformer", "swin", "swinv2", "vit", "vit_msn"),
)
SOUND = ("wav2vec2", "hubert", "unispeech", "data2vec-audio", "sew", "whisper")
HEADS, HEAD, BATCHES = (4, 8, 12, 16, 24), (64, 128), (1, 2, 4, 8, 16)
LENGTHS = (64, 128, 256, 512, 1024)
IMAGE_SIZES = (64, 128, 224)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def drawn_model(chosen, device, *, tiny):
    """Return the name and the call of one model's block, None where it cannot be built."""
    kind = chosen.choices(("text", "image", "sound"), (6, 3, 1))[0]
    name = chosen.choice({"text": TEXT, "image": IMAGE, "sound": SOUND}[kind])
    dtype, autocast = chosen.choice(DTYPES), chosen.random() < 0.3
    backward = chosen.random() < 0.5
    try:
        config = _configured(name, chosen, tiny)
        model = transformers.AutoModel.from_config(config)
    except Exception:  # noqa: BLE001 a configuration that its own model refuses is left out
        return None
    model = model.to(device=device, dtype=torch.float32 if autocast else dtype).train(backward)
    inputs = _inputs(kind, config, chosen, tiny, device)
    if not autocast:
        inputs = {k: x.to(dtype) if x.is_floating_point() else x for k, x in inputs.items()}
    if name == "whisper" or getattr(config, "is_encoder_decoder", False):
        model = model.get_encoder()
    half = torch.bfloat16 if dtype is torch.float32 else dtype

    def call():
        with (
            torch.set_grad_enabled(backward),
            torch.autocast(device, dtype=half, enabled=autocast),
        ):
            found = model(**inputs)[0]
        if backward:
            found.sum().backward()
            model.zero_grad(set_to_none=True)

    shape = "x".join(str(n) for n in next(iter(inputs.values())).shape)
    way = "backward" if backward else "forward"
    return f"{name} {str(dtype)[6:]}{' autocast' * autocast} {way} {shape}", call


def _configured(name, chosen, tiny):
    """Return a configuration of one layer; what a model does not have is not set."""
    config = transformers.AutoConfig.for_model(name)
    heads, head = (2, 16) if tiny else (chosen.choice(HEADS), chosen.choice(HEAD))
    width = heads * head
    groups = chosen.choice([n for n in (1, 2, 4, heads) if heads % n == 0])
    wanted = {
        "num_hidden_layers": 1,
        "num_layers": 1,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "hidden_size": width,
        "embedding_size": width,
        "d_kv": head,
        "num_attention_heads": heads,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "intermediate_size": chosen.choice((2, 3, 4)) * width,
        "encoder_ffn_dim": chosen.choice((2, 4)) * width,
        "decoder_ffn_dim": 2 * width,
        "vocab_size": 512 if tiny else chosen.choice((8192, 32000)),
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
    }
    # Convolutional models name widths by stage, which only their own defaults keep in step.
    is_staged = any(hasattr(config, key) for key in ("hidden_sizes", "depths", "embed_dims"))
    if name in TEXT or not is_staged:
        for key, value in wanted.items():
            if hasattr(config, key):
                setattr(config, key, value)
    if hasattr(config, "depths"):
        config.depths = [1] * len(config.depths)
    if name in ("gpt_neo",):
        config.attention_types, config.attention_layers = [[["global"], 1]], ["global"]
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types)[:1]
    return config


def _inputs(kind, config, chosen, tiny, device):
    batch = 1 if tiny else chosen.choice(BATCHES)
    if kind == "text":
        length = 16 if tiny else chosen.choice(LENGTHS)
        return {"input_ids": torch.randint(1, 500, (batch, length)).to(device)}
    if kind == "image":
        size = getattr(config, "image_size", None)
        size = size if isinstance(size, int) else (64 if tiny else chosen.choice(IMAGE_SIZES))
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.randn(batch, channels, size, size).to(device)}
    if config.model_type == "whisper":
        shape = batch, config.num_mel_bins, 2 * config.max_source_positions
        return {"input_features": torch.randn(shape).to(device)}
    return {"input_values": torch.randn(batch, 4000 if tiny else 16000).to(device)}
