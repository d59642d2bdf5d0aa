"""What people call the models: a family's name, and how its model types begin."""

from __future__ import annotations

# In the order of the page. A model type belongs to the family with the longest matching beginning.
FAMILIES: dict[str, tuple[str, ...]] = {
    "Llama": ("llama", "mllama"),
    "Mistral and Mixtral": ("mistral", "mixtral", "ministral", "pixtral", "voxtral"),
    "Qwen": ("qwen",),
    "Gemma": ("gemma", "vaultgemma", "paligemma", "shieldgemma", "recurrent_gemma", "t5gemma"),
    "DeepSeek and Kimi": ("deepseek", "kimi"),
    "gpt-oss": ("gpt_oss",),
    "GPT-2, GPT-J, GPT-NeoX": ("gpt2", "gptj", "gpt_neo", "gpt_neox", "openai-gpt", "codegen", "gpt_bigcode"),
    "Phi": ("phi",),
    "GLM": ("glm", "chatglm"),
    "Granite": ("granite",),
    "OLMo": ("olmo", "flex_olmo", "molmo"),
    "Cohere Command": ("cohere", "aya_vision"),
    "Falcon": ("falcon",),
    "SmolLM": ("smollm",),
    "EXAONE": ("exaone",),
    "Ernie": ("ernie",),
    "Nemotron": ("nemotron",),
    "LFM": ("lfm",),
    "MiniMax and MiniCPM": ("minimax", "minicpm"),
    "Hunyuan": ("hunyuan", "hy_"),
    "OPT, BLOOM, MPT": ("opt", "bloom", "mpt"),
    "StarCoder": ("starcoder",),
    "StableLM": ("stablelm",),
    "Mamba, Jamba, Zamba": ("mamba", "falcon_mamba", "jamba", "zamba", "bamba"),
    "BERT's relatives": (
        "bert",
        "roberta",
        "xlm",
        "camembert",
        "data2vec",
        "electra",
        "ernie_m",
        "megatron-bert",
        "rembert",
        "roformer",
        "roc_bert",
        "xmod",
    ),
    "BART and Pegasus": ("bart", "mbart", "pegasus", "plbart", "bigbird_pegasus", "led", "blenderbot", "marian"),
    "T5": ("t5", "mt5", "umt5", "longt5", "switch_transformers"),
    "LLaVA": ("llava", "vipllava", "video_llava"),
    "InternVL": ("internvl",),
    "Idefics and SmolVLM": ("idefics", "smolvlm"),
}

OTHERS = "Others"


def family_of(model_type: str) -> str:
    """The name of a model type's family, or `OTHERS`."""
    matches = [
        (len(beginning), name)
        for name, beginnings in FAMILIES.items()
        for beginning in beginnings
        if model_type == beginning or model_type.startswith(beginning)
    ]
    return max(matches)[1] if matches else OTHERS
