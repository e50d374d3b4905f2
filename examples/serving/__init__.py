"""A server of completions: a Haiku Llama, many adapters, requests that are decoded together."""
