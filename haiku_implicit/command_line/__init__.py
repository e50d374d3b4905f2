"""The program `haiku-implicit`: shows and changes checkpoints without code."""
