"""Trees of parameters: which weights an edit chooses, and warnings about the others."""
