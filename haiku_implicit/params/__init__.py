"""The Haiku side: wrapped models, and edits that put implicit arrays into their parameters."""
