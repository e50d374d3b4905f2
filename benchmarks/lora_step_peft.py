"""PEFT's side of `benchmarks.lora_step`: needs torch, transformers and peft, not this library.

The model has SmolLM2's sizes and random weights in float32.
"""

import json
import resource
import sys
import time

import peft
import torch
import transformers


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    )
    targets = [f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")]
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = torch.randint(config.vocab_size, (2, 129))
    for _ in sys.stdin:
        start = time.process_time()
        logits = model(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps(dict(seconds=seconds, peak=peak, loss=loss.item())), flush=True)


if __name__ == "__main__":
    main()
