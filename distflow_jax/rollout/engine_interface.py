"""The interface of an engine: JetStream's where it is installed, else engine_stand_ins.py.

Generation is written against the names of `__all__`. JetStream 0.2.2 imports seqio, and so
TensorFlow, and tiktoken for tokenizers of its own that this package does not use. While its modules
are imported here, modules with the names that they look up stand in for both packages. Afterwards
the process finds the installed ones again, if there are any.

pip cannot leave out a dependency's dependencies, so JetStream is no dependency of this package.
"""

import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

# {module: names that JetStream imports from it}
_UNUSED = {
    "seqio": (),
    "seqio.vocabularies": ("SentencePieceVocabulary", "Vocabulary"),
    "tiktoken": ("Encoding",),
    "tiktoken.load": ("load_tiktoken_bpe",),
}


class _NotImported:
    """A class of seqio or tiktoken, of which JetStream's own tokenizers are made."""

    def __init__(self, *args, **kwargs):
        raise RuntimeError(
            "JetStream was imported without seqio and tiktoken, which its own tokenizers need: "
            "import jetstream.engine.token_utils before distflow_jax"
        )


@contextlib.contextmanager
def _without_tokenizers() -> Iterator[None]:
    """Modules of the table above stand in for the installed ones, which are restored at the end."""
    installed = {name: sys.modules.get(name) for name in _UNUSED}
    for name, attributes in _UNUSED.items():
        module = ModuleType(name)
        # importlib.util.find_spec, called by another thread meanwhile, raises without one
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(dict.fromkeys(attributes, _NotImported))
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module in installed.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


try:
    with _without_tokenizers():
        from jetstream.engine.engine_api import Engine, ResultTokens, SlotData
        from jetstream.engine.tokenizer_api import Tokenizer as EngineTokenizer
        from jetstream.engine.tokenizer_pb2 import TokenizerParameters
    INSTALLED = True
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] != "jetstream":
        raise
    from distflow_jax.rollout.engine_stand_ins import (
        Engine,
        EngineTokenizer,
        ResultTokens,
        SlotData,
        TokenizerParameters,
    )

    INSTALLED = False

__all__ = ["Engine", "EngineTokenizer", "ResultTokens", "SlotData", "TokenizerParameters"]
