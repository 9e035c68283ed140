"""Writes GGUF files for tests, and records where each header field is."""

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

STRING, ARRAY = 8, 9
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, UINT64 = 4, 5, 6, 7, 10
BLOCKS = {  # Type -> (its number, values per block, bytes per block).
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "BF16": (30, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q8_0": (8, 32, 34),
    "Q6_K": (14, 256, 210),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
    "MXFP4": (39, 32, 17),
}
# Type -> byte offsets in a block for the float16 scale, or for scale and minimum.
HALVES = dict.fromkeys(("Q4_0", "Q8_0", "Q5_0", "IQ4_NL", "IQ4_XS"), (0,))
HALVES |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
HALVES |= {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82), "MXFP4": ()}


@dataclass(frozen=True)
class Tensor:
    name: str
    type: str
    shape: tuple[int, ...]  # In torch's order, the reverse of GGUF's.
    data: bytes


@dataclass
class Written:
    """A written file. `spans`: the name, start and length in bytes of each header field."""

    data: bytearray = field(default_factory=bytearray)
    spans: list[tuple[str, int, int]] = field(default_factory=list)

    def put(self, name: str, form: str, *values: Any) -> None:
        packed = struct.pack(f"<{form}", *values)
        self.spans.append((name, len(self.data), len(packed)))
        self.data += packed

    def string(self, name: str, text: str | bytes) -> None:
        raw = text if isinstance(text, bytes) else text.encode()
        self.put(f"length of {name}", "Q", len(raw))
        self.spans.append((name, len(self.data), len(raw)))
        self.data += raw

    def value(self, name: str, kind: int, value: Any) -> None:
        self.put(f"type of {name}", "I", kind)
        if kind == STRING:
            self.string(name, value)
        elif kind == ARRAY:
            element, entries = value
            self.put(f"entries' type of {name}", "I", element)
            self.put(f"count of {name}", "Q", len(entries))
            for place, entry in enumerate(entries):
                if element == STRING:
                    self.string(f"{name} {place}", entry)
                else:
                    self.put(f"{name} {place}", FORMS[element], entry)
        else:
            self.put(name, FORMS[kind], value)


def write(
    metadata: list[tuple[str, int, Any]],
    tensors: list[Tensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
) -> Written:
    """Return a GGUF file. `metadata`: keys, types and values; an array's value is (type, entries). `counts`:
    wrong numbers of tensors and keys to write to the header.
    """
    out = Written(bytearray(b"GGUF"), [("magic", 0, 4)])
    num_tensors, num_keys = counts or (len(tensors), len(metadata))
    out.put("version", "I", version)
    out.put("number of tensors", "Q", num_tensors)
    out.put("number of keys", "Q", num_keys)
    for key, kind, value in metadata:
        out.string(f"key {key}", key)
        out.value(key, kind, value)
    offset, blobs = 0, []
    for tensor in tensors:
        out.string(f"name of {tensor.name}", tensor.name)
        out.put(f"dimensions of {tensor.name}", "I", len(tensor.shape))
        for size in reversed(tensor.shape):
            out.put(f"size of {tensor.name}", "Q", size)
        out.put(f"type of {tensor.name}", "I", BLOCKS[tensor.type][0])
        out.put(f"offset of {tensor.name}", "Q", offset)
        blobs.append((offset, tensor.data))
        offset += -(-len(tensor.data) // alignment) * alignment
    if tensors:
        out.data += bytes(-len(out.data) % alignment)
        start = len(out.data)
        for offset, data in blobs:
            out.data += bytes(start + offset - len(out.data)) + data
    return out


def packed(kind: str, shape: tuple[int, ...], seed: int) -> bytes:
    """Return the bytes for a random tensor with finite, moderate values."""
    rng = np.random.default_rng(seed)
    _, values, size = BLOCKS[kind]
    count = int(np.prod(shape)) // values
    floats = rng.standard_normal((count, 2))
    if kind == "F32":
        return floats[:, 0].astype("<f4").tobytes()
    if kind == "BF16":
        return (floats[:, 0].astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    halves = floats.astype("<f2").view(np.uint8).reshape(count, 4)
    if kind == "F16":
        return halves[:, :2].tobytes()
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    for place, start in enumerate(HALVES[kind]):
        blocks[:, start : start + 2] = halves[:, 2 * place : 2 * place + 2]
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(120, 130, count)  # The exponent.
    if kind == "Q8_0":
        blocks[:, 2:][blocks[:, 2:] == 0x80] = 0  # Replace -128, a code that no writer produces.
    return blocks.tobytes()


def tensor(name: str, kind: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return Tensor(name, kind, shape, packed(kind, shape, seed))


def byte_characters() -> list[str]:
    """Return byte-level BPE's characters for the bytes 0 to 255."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]


def vocabulary(cut: str = "smollm", **more: tuple[int, Any]) -> list[tuple[str, int, Any]]:
    """Return the metadata for a small vocabulary: two special tokens, bytes, three merges, an added token and
    a padding token. `more`: keys to add or replace, without the prefix `tokenizer.ggml.`.
    """
    tokens = ["<|start|>", "<|end|>", *byte_characters(), "he", "ll", "hell", "<think>", "[PAD262]"]
    types = [3, 3, *[1] * 259, 4, 5]
    keys: dict[str, tuple[int, Any]] = {
        "model": (STRING, "gpt2"),
        "pre": (STRING, cut),
        "tokens": (ARRAY, (STRING, tokens)),
        "token_type": (ARRAY, (INT32, types)),
        "merges": (ARRAY, (STRING, ["h e", "l l", "he ll"])),
        "bos_token_id": (UINT32, 0),
        "eos_token_id": (UINT32, 1),
    } | more
    return [(f"tokenizer.ggml.{name}", kind, value) for name, (kind, value) in keys.items()]


def model(architecture: str = "llama", **more: tuple[int, Any]) -> list[tuple[str, int, Any]]:
    """Return the metadata for a small model: 2 layers, hidden size 64, 4 heads and 2 KV heads with 16 values
    each, intermediate size 96. `more`: keys to add or replace, without the architecture as prefix.
    """
    keys: dict[str, tuple[int, Any]] = {
        "block_count": (UINT32, 2),
        "context_length": (UINT32, 128),
        "embedding_length": (UINT32, 64),
        "feed_forward_length": (UINT32, 96),
        "attention.head_count": (UINT32, 4),
        "attention.head_count_kv": (UINT32, 2),
        "attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5),
        "rope.freq_base": (FLOAT32, 5000.0),
    } | more
    first = [("general.architecture", STRING, architecture), ("general.name", STRING, "small")]
    return first + [(f"{architecture}.{name}", kind, value) for name, (kind, value) in keys.items()]


def weights(kind: str = "Q4_1", *, head: bool = False, hidden: int = 64, ends: str = "") -> list[Tensor]:
    """Return the tensors for `model`: matrices of type `kind`, and float32 norms. `hidden`: the model's
    embedding_length. `ends`: the type for the embedding and the head; "": `kind`.
    """
    shapes = {"token_embd.weight": (263, hidden), "output_norm.weight": (hidden,)}
    square, half, up = (hidden, hidden), (hidden // 2, hidden), (96, hidden)
    layer = {"attn_norm": (hidden,), "attn_q": square, "attn_k": half, "attn_v": half, "attn_output": square}
    layer |= {"ffn_norm": (hidden,), "ffn_gate": up, "ffn_up": up, "ffn_down": (hidden, 96)}
    for index in range(2):
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
    if head:
        shapes["output.weight"] = (263, hidden)
    kinds = {"token_embd.weight": ends or kind, "output.weight": ends or kind}
    return [
        tensor(name, "F32" if len(shape) == 1 else kinds.get(name, kind), shape, seed)
        for seed, (name, shape) in enumerate(shapes.items())
    ]
