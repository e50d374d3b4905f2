"""Makes the folders of hub/, tiny random models as Hugging Face saves them, and what they compute.

Each has ``config.json`` and ``model.safetensors`` as ``save_pretrained`` of transformers (PyTorch,
float32, CPU) writes them, and ``expected.npz`` with the arguments of the Haiku model (``input_0``
and so on) and the output of the other one.

To make them anew::

    pip install torch transformers
    python tests/data/make_hub_goldens.py
"""

import json
import pathlib

import numpy as np
import torch
import transformers

TARGET = pathlib.Path(__file__).with_name("hub")
BATCH, TIME, VOCAB = 2, 12, 40


def gpt2(**changes):
    sizes = dict(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=TIME)
    sizes |= dict(bos_token_id=0, eos_token_id=0) | changes
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def t5(**changes):
    sizes = dict(vocab_size=VOCAB, d_model=16, num_heads=2, d_kv=6, d_ff=24)
    sizes |= dict(num_layers=2, num_decoder_layers=1, decoder_start_token_id=0)
    sizes |= dict(relative_attention_num_buckets=8, relative_attention_max_distance=20) | changes
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def t5_v1_1(**changes):
    model = t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False, **changes)
    # transformers 5 makes all T5 with one weight for both, and leaves them apart where it reads two.
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, 16))
    return model


def bert_config(**changes):
    sizes = dict(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(intermediate_size=24, max_position_embeddings=TIME) | changes
    return transformers.BertConfig(**sizes)


def bert(**changes):
    return transformers.BertForMaskedLM(bert_config(**changes))


def bert_encoder(**changes):
    return transformers.BertModel(bert_config(**changes))


def llama(**changes):
    sizes = dict(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, intermediate_size=24)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(rope_parameters=dict(rope_type="default", rope_theta=50.0)) | changes
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def llama_tied(**changes):
    return llama(tie_word_embeddings=True, **changes)


def vit_config(**changes):
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)
    sizes |= dict(image_size=12, patch_size=4) | changes
    return transformers.ViTConfig(**sizes)


def vit(**changes):
    return transformers.ViTForImageClassification(vit_config(num_labels=5, **changes))


def vit_pooled(**changes):
    return transformers.ViTModel(vit_config(**changes))


MODELS = [gpt2, t5, t5_v1_1, bert, bert_encoder, llama, llama_tied, vit, vit_pooled]


def randomize(model) -> None:
    """Weights so large that attention is far from uniform and every part shows in the outputs."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = "norm" in name.lower() or ".ln_" in name
            weight.normal_(mean=1.0 if scale and name.endswith("weight") else 0.0, std=0.25)


def arguments(model) -> tuple[torch.Tensor, ...]:
    """Arguments for the Haiku model, which has channels last."""
    kind = model.config.model_type
    if kind == "vit":
        return (torch.rand(BATCH, 12, 12, 3) * 2 - 1,)
    # T5's reach the buckets of several distances.
    time = 26 if kind == "t5" else TIME
    tokens = torch.randint(VOCAB, (BATCH, time))
    mask = torch.arange(time) < torch.tensor([[time], [time - 5]])
    targets = torch.randint(VOCAB, (BATCH, 24))
    return {"t5": (tokens, mask, targets), "bert": (tokens, mask)}.get(kind, (tokens,))


def outputs(model, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What the Haiku model returns for these arguments."""
    kind = model.config.model_type
    with torch.no_grad():
        if kind == "vit":
            found = model(inputs[0].permute(0, 3, 1, 2))
        elif kind == "t5":
            tokens, mask, targets = inputs
            found = model(tokens, attention_mask=mask.long(), decoder_input_ids=targets)
        elif kind == "bert":
            found = model(inputs[0], attention_mask=inputs[1].long())
        else:
            found = model(*inputs)
    if kind == "vit" and "pooler_output" in found:
        return found.pooler_output
    return found.logits if "logits" in found else found.last_hidden_state


def save(make, folder: pathlib.Path, **changes) -> None:
    """Writes a folder; ``changes`` are settings of the model."""
    torch.manual_seed(0)
    model = make(**changes).eval()
    randomize(model)
    inputs = arguments(model)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    arrays = {f"input_{i}": x.numpy() for i, x in enumerate(inputs)}
    arrays["output"] = outputs(model, inputs).numpy()
    made_by = {
        "script": "tests/data/make_hub_goldens.py",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    np.savez_compressed(folder / "expected.npz", made_by=json.dumps(made_by), **arrays)


def main():
    for make in MODELS:
        save(make, TARGET / make.__name__)


if __name__ == "__main__":
    main()
