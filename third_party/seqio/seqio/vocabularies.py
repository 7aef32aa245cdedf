"""The two names that JetStream imports from seqio.vocabularies.

`Vocabulary` is the base class of JetStream's own test vocabulary. `SentencePieceVocabulary` reads a
SentencePiece model through the `sentencepiece` package when that is installed; distflow_jax never
uses it, since its engine builds its own tokenizer.
"""

import importlib


class Vocabulary:
    """Base class of token vocabularies; JetStream's mock derives from it."""

    def __init__(self, extra_ids=0):
        self.extra_ids = extra_ids


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model as JetStream's SentencePieceTokenizer uses it, without TensorFlow."""

    def __init__(self, sentencepiece_model_file, extra_ids=0):
        super().__init__(extra_ids)
        self.sentencepiece_model_file = sentencepiece_model_file
        module = importlib.import_module("sentencepiece")  # optional package
        self.tokenizer = module.SentencePieceProcessor(model_file=str(sentencepiece_model_file))

    @property
    def sp_model(self):
        """The serialised model."""
        return self.tokenizer.serialized_model_proto()

    @property
    def pad_id(self):
        """Id of the padding token."""
        return self.tokenizer.pad_id()

    @property
    def eos_id(self):
        """Id of the end token."""
        return self.tokenizer.eos_id()

    @property
    def bos_id(self):
        """Id of the start token."""
        return self.tokenizer.bos_id()

    @property
    def unk_id(self):
        """Id of the unknown token."""
        return self.tokenizer.unk_id()

    def encode(self, s):
        """Text to a list of ids."""
        return self.tokenizer.encode(s)

    encode_tf = encode

    def decode(self, ids):
        """Ids to text."""
        return self.tokenizer.decode([int(i) for i in ids])

    decode_tf = decode
