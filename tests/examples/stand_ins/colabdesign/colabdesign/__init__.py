"""A small model with the habits of ProteinMPNN, as ColabDesign has it."""
