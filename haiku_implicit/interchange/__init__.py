"""Weights and adapters in the files of other libraries: GGUF, Hugging Face, PEFT."""
