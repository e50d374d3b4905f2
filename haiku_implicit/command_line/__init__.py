"""The program `haiku-implicit`: checkpoints looked at and changed without a line of code."""
