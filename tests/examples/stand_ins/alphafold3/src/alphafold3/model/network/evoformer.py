"""The trunk's settings."""

import dataclasses

from alphafold3.model import model_config


class Evoformer:
    @dataclasses.dataclass
    class Config:
        pairformer: model_config.Stack = dataclasses.field(default_factory=model_config.Stack)
