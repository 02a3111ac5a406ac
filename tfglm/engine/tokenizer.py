"""Text to token ids and back, from a checkpoint's tokenizer.json (byte-level BPE). Never imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tokenizers

from tfglm.errors import CheckpointError


class Tokenizer:
    """A byte-level BPE tokenizer whose ids are 0..vocab_size-1 without holes.

    Decoding goes through the bytes of each id, so text of any run of ids is exactly the UTF-8 reading of their joined
    bytes, invalid parts shown as U+FFFD. Every method may be called from several threads at once.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Take over a loaded tokenizer. Raises CheckpointError if its ids have holes."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._ids = vocabulary
        self._added = frozenset(added)
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        table: list[bytes | None] = [None] * len(vocabulary)
        for token, token_id in vocabulary.items():
            if token_id >= len(table):
                raise CheckpointError(
                    f"tokenizer.json has {len(table)} tokens but gives {token!r} the id {token_id}; "
                    f"ids must be 0 to {len(table) - 1} without holes"
                )
            table[token_id] = token.encode() if token_id in added else _byte_level(token)
        self._bytes = [entry for entry in table if entry is not None]
        if len(self._bytes) != len(table):
            raise CheckpointError("tokenizer.json gives two tokens the same id; every id must be used once")

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a checkpoint folder. Raises CheckpointError if tokenizer.json is missing or unusable."""
        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; a checkpoint folder needs its tokenizer.json")
        try:
            loaded = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for every kind of defect
            raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from None
        if not isinstance(loaded.model, tokenizers.models.BPE):
            raise CheckpointError(f"{file} holds a {type(loaded.model).__name__} model; byte-level BPE is supported")
        return cls(loaded)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; the model's vocabulary may be padded beyond it."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Token ids of text. Added tokens written in it are recognised; nothing is put before or after.

        Lone surrogates, which no encoding can carry, become U+FFFD.
        """
        # Of the library's calls only those for batches let other threads run: 20 MB of text take seconds, in which no
        # reply would go on.
        try:
            encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except TypeError:
            clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            encodings = self._tokenizer.encode_batch_fast([clean], add_special_tokens=False)
        ids: list[int] = encodings[0].ids
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of ids; skip_special leaves out the tokens marked special. Raises ValueError for an id out of range."""
        dropped = self._special if skip_special else frozenset[int]()
        return b"".join(self.token_bytes(i) for i in ids if i not in dropped).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes an id stands for; an added token stands for its own UTF-8 text."""
        if not 0 <= token_id < len(self._bytes):
            raise ValueError(f"token id {token_id} is outside 0 to {len(self._bytes) - 1}")
        return self._bytes[token_id]

    def token_str(self, token_id: int) -> str:
        """Text of one token by itself; bytes that are not a whole character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        """Id of a vocabulary entry in the file's own spelling (added tokens: their text), None if there is none."""
        return self._ids.get(token)

    def is_added(self, token_id: int) -> bool:
        """Whether the id was added beside the trained vocabulary (markup, special or not)."""
        return token_id in self._added

    def is_special(self, token_id: int) -> bool:
        """Whether the id is an added token marked special: it steers, and is never shown."""
        return token_id in self._special


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE files (GPT-2's published map).

    Bytes with a visible Latin-1 character stand for themselves; the other 68 take U+0100 upwards in byte order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError as error:
        raise CheckpointError(
            f"tokenizer.json has the token {token!r}, whose character {error.args[0]!r} stands for no byte; "
            "byte-level BPE is supported"
        ) from None
