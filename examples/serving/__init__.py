"""A server of completions: a Haiku Llama with many adapters, whose requests are decoded together."""
