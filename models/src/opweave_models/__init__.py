"""Language and embedding models from files (GGUF, Hugging Face folders), over any devices of opweave.

::

    import opweave_models

    llm = opweave_models.load("m.gguf")
    print(llm.plan)
    for piece in llm.chat([{"role": "user", "content": "Why is the sky blue?"}]):
        print(piece.text, end="", flush=True)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opweave_models.chat import Template
    from opweave_models.config import ARCHITECTURES, Config
    from opweave_models.files import ModelFile, open_model
    from opweave_models.folding import (
        add_relative_positions,
        col2im1d,
        relative_positions,
        window_partition,
        window_unpartition,
    )
    from opweave_models.hyper_connection import hyper_connection_post, hyper_connection_pre
    from opweave_models.model import Model, Session, Stats, load
    from opweave_models.placement import Plan, Share, plan_placement
    from opweave_models.sampling import Piece, Sampling
    from opweave_models.tokenizer import Tokenizer, read_tokenizer

__all__ = [
    "ARCHITECTURES", "Config", "Model", "ModelFile", "Piece", "Plan", "Sampling", "Session", "Share", "Stats",
    "Template", "Tokenizer", "add_relative_positions", "col2im1d", "hyper_connection_post", "hyper_connection_pre",
    "load", "open_model", "plan_placement", "read_tokenizer", "relative_positions", "window_partition",
    "window_unpartition",
]  # fmt: skip

# The hooks are imported with every command of `opweave`, and need nothing of this: it is imported when it is asked for.
_MODULES = {
    "ARCHITECTURES": "config", "Config": "config", "Model": "model", "ModelFile": "files", "Piece": "sampling",
    "Plan": "placement", "Sampling": "sampling", "Session": "model", "Share": "placement", "Stats": "model",
    "Template": "chat", "Tokenizer": "tokenizer", "add_relative_positions": "folding", "col2im1d": "folding",
    "hyper_connection_post": "hyper_connection", "hyper_connection_pre": "hyper_connection", "load": "model",
    "open_model": "files", "plan_placement": "placement", "read_tokenizer": "tokenizer",
    "relative_positions": "folding", "window_partition": "folding", "window_unpartition": "folding",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
