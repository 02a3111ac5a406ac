"""EXL3 weights in the forward pass: against float64, row by row, in slices, and out of real checkpoint files."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.errors import CheckpointError
from tfglm.formats.exl3 import reconstruct
from tfglm.formats.exl3_tensors import Exl3Linear
from tfglm.layout import Family, Layout, Placement
from tfglm.models.exl3_loader import Shares, read_experts
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.source import CheckpointSource
from tfglm.models.weights import load_weights
from tfglm.models.window import Rows
from tfglm.ops import exl3_reference
from tfglm.ops.base import PlainExperts, Routing
from tfglm.ops.exl3_weights import Exl3Experts, Exl3Weight, StackedWeight
from tfglm.ops.reference import ReferenceOps

HIDDEN, INNER, EXPERTS, PICKS = 256, 384, 5, 3
PREFIX = "model.layers.1.mlp.experts"
FIELDS = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}


class Pack:
    """Random EXL3 tensors by name, read as a checkpoint reads them, with a count of the elements handed out."""

    def __init__(self, *, shared_suh: bool = True, codebook: str = "mcg", bits: tuple[float, ...] = (2, 3, 4)) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.linears: dict[str, Exl3Linear] = {}
        self.matrices: dict[str, np.ndarray] = {}
        self.read_elements: dict[str, int] = {}
        self.random = torch.Generator().manual_seed(0)
        suh = self._scales(HIDDEN, HIDDEN)
        for expert in range(EXPERTS):
            for place, name in enumerate(("gate_proj", "up_proj", "down_proj")):
                k, n = (INNER, HIDDEN) if name == "down_proj" else (HIDDEN, INNER)
                width = bits[(expert + place // 2) % len(bits)]
                given = suh if shared_suh and name != "down_proj" else None
                self.add(f"{PREFIX}.{expert}.{name}", k, n, width, codebook, given)

    def add(
        self, prefix: str, k: int, n: int, bits: float, codebook: str = "mcg", suh: torch.Tensor | None = None
    ) -> None:
        shape = (k // 16, n // 16, int(16 * bits))
        self.tensors[f"{prefix}.trellis"] = torch.randint(
            -(2**15), 2**15, shape, dtype=torch.int16, generator=self.random
        )
        self.tensors[f"{prefix}.suh"] = self._scales(k, k) if suh is None else suh
        self.tensors[f"{prefix}.svh"] = self._scales(n, 1)
        if codebook != "3inst":
            value = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[codebook] - 2**32
            self.tensors[f"{prefix}.{codebook}"] = torch.tensor(value, dtype=torch.int32)
        self.linears[prefix] = Exl3Linear(k, n, bits, codebook, False, ())

    def _scales(self, size: int, inputs: int) -> torch.Tensor:
        return (torch.randn(size, generator=self.random) * inputs**-0.5).half()

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        tensor = self.tensors[name]
        tensor = tensor if rows is None else tensor[rows]
        tensor = tensor if columns is None else tensor[:, columns]
        self.read_elements[name] = tensor.numel()
        return tensor.clone()

    def matrix(self, prefix: str) -> np.ndarray:
        """float64 [k, n]"""
        if prefix not in self.matrices:
            parts = (self.tensors[f"{prefix}.{field}"] for field in ("trellis", "suh", "svh"))
            self.matrices[prefix] = reconstruct(*parts, self.linears[prefix].codebook).double().numpy()
        return self.matrices[prefix]

    def experts(self, share: Shares | None = None) -> Exl3Experts:
        return read_experts(self.read, self.linears, PREFIX, EXPERTS, share)

    def expected(self, x: torch.Tensor, routing: Routing) -> np.ndarray:
        """The weighted sum of each row's experts in float64."""
        out = np.zeros((len(x), HIDDEN))
        for row in range(len(x)):
            for expert, weight in zip(routing.experts[row].tolist(), routing.weights[row].tolist(), strict=True):
                gate, up, down = (self.matrix(f"{PREFIX}.{expert}.{name}_proj") for name in ("gate", "up", "down"))
                inputs = x[row].double().numpy()
                g = inputs @ gate
                out[row] += weight * ((g / (1 + np.exp(-g)) * (inputs @ up)) @ down)
        return out


def normal(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def routing_of(rows: int) -> Routing:
    choice = torch.rand(rows, EXPERTS, generator=torch.Generator().manual_seed(rows)).argsort(dim=1)[:, :PICKS]
    return Routing(choice, normal(rows, PICKS).abs())


def close(found: torch.Tensor, expected: np.ndarray) -> bool:
    """Within a few fp16 roundings (2^-11) of the inputs."""
    scale = np.abs(expected).max()
    return bool(np.abs(found.numpy() - expected).max() < 4e-3 * scale)


@pytest.mark.parametrize(
    ("shared_suh", "codebook", "bits"),
    [(True, "mcg", (2, 3, 4)), (False, "mcg", (2, 3, 4)), (True, "mul1", (2.5, 3.5, 1.5)), (False, "3inst", (8, 1))],
)
def test_experts_against_float64(shared_suh: bool, codebook: str, bits: tuple[float, ...]) -> None:
    pack = Pack(shared_suh=shared_suh, codebook=codebook, bits=bits)
    experts = pack.experts()
    assert experts.shared_suh == shared_suh
    x, routing = normal(19, HIDDEN), routing_of(19)
    assert close(ReferenceOps().experts(x, routing, experts), pack.expected(x, routing))


@pytest.mark.parametrize("shared_suh", [True, False])
def test_a_row_does_not_depend_on_its_neighbours(shared_suh: bool) -> None:
    experts, ops = Pack(shared_suh=shared_suh).experts(), ReferenceOps()
    x, routing = normal(40, HIDDEN), routing_of(40)
    together = ops.experts(x, routing, experts)
    for start, stop in ((0, 1), (7, 8), (3, 12), (20, 40)):
        part = Routing(routing.experts[start:stop], routing.weights[start:stop])
        assert torch.equal(ops.experts(x[start:stop], part, experts), together[start:stop])


def test_linear_with_padding_against_float64() -> None:
    pack = Pack()
    pack.add("plain", 256, 384, 5, "mcg")
    trellis, suh, svh = (pack.tensors[f"plain.{field}"] for field in ("trellis", "suh", "svh"))
    weight = Exl3Weight(trellis, suh, svh, "mcg", inputs=200, outputs=300)
    x, ops = normal(21, 200), ReferenceOps()
    found = ops.linear(x, weight)
    assert close(found, x.double().numpy() @ pack.matrix("plain")[:200, :300])
    assert torch.equal(ops.linear(x[5:6], weight)[0], found[5])
    other = normal(64, 200)
    assert torch.equal(ops.linear(x, StackedWeight((weight, other))), torch.cat([found, ops.linear(x, other)], dim=1))


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shared_suh", [True, False])
def test_ranks_hold_whole_blocks_and_sum_to_the_whole(placement: Placement, ranks: int, shared_suh: bool) -> None:
    """Four ranks of three blocks: under BY_EXPERT each rank holds nothing of some experts, under BY_LAYER one holds
    nothing at all."""
    pack = Pack(shared_suh=shared_suh)
    layout = Layout(
        ranks, heads=1, routed_columns=INNER, shared_columns=128, dense_columns=128, vocabulary=64, placement=placement
    )
    x, routing, ops = normal(6, HIDDEN), routing_of(6), ReferenceOps()
    total = torch.zeros(6, HIDDEN)
    for rank in range(ranks):
        shares = [layout.share(Family.ROUTED, 3, rank, expert) for expert in range(EXPERTS)]
        if all(start == stop for start, stop in shares):
            with pytest.raises(ValueError, match="no columns of any of 5 experts"):
                pack.experts(shares)
            continue
        pack.read_elements.clear()
        part = pack.experts(shares)
        assert part.inner.tolist() == [stop - start for start, stop in shares]
        assert len(set(part.inner.tolist())) == (1 if placement is Placement.BY_LAYER else 2)
        for expert, (start, stop) in enumerate(shares):
            for place, name in enumerate(("gate_proj", "up_proj", "down_proj")):
                whole = pack.tensors[f"{PREFIX}.{expert}.{name}.trellis"]
                cut = (slice(None), slice(start // 16, stop // 16))
                kept = whole[cut[::-1] if name == "down_proj" else cut]
                assert torch.equal(part.trellis(place, expert), kept)
                assert part.trellis(place, expert).data_ptr() % 128 == 0 or not kept.numel()
                assert pack.read_elements.get(f"{PREFIX}.{expert}.{name}.trellis", 0) == kept.numel()
        found = ops.experts(x, routing, part)
        alone = [
            ops.experts(x[i : i + 1], Routing(routing.experts[i : i + 1], routing.weights[i : i + 1]), part)
            for i in range(6)
        ]
        assert torch.equal(torch.cat(alone), found)
        total += found
    assert close(total, pack.expected(x, routing))


def test_shares_that_are_none() -> None:
    pack = Pack()
    with pytest.raises(ValueError, match="expert 2: columns 0 to 64 of 384 are no whole blocks of 128"):
        pack.experts([(0, 64 if expert == 2 else 128) for expert in range(EXPERTS)])
    with pytest.raises(ValueError, match="4 shares of 5 experts"):
        pack.experts([(0, 128)] * 4)


def test_tables_of_the_buffer() -> None:
    pack = Pack()
    experts = pack.experts()
    assert experts.buffer.data_ptr() % 128 == 0
    sizes = [
        2 * pack.tensors[f"{PREFIX}.{e}.{n}_proj.trellis"].numel() for e in range(5) for n in ("gate", "up", "down")
    ]
    assert experts.offsets.T.flatten().tolist() == [sum(sizes[:i]) for i in range(15)]
    assert len(experts.buffer) == sum(sizes)
    assert experts.half_bits.T.tolist()[0] == [4, 4, 6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pack: pack.linears.pop(f"{PREFIX}.2.up_proj"), "experts.2.up_proj is not EXL3 while .*0.gate_proj is"),
        (
            lambda pack: pack.add(f"{PREFIX}.1.down_proj", INNER, HIDDEN, 3, "mul1"),
            "experts.1.down_proj has codebook mul1 and .* mcg",
        ),
        (
            lambda pack: pack.tensors.update({f"{PREFIX}.3.up_proj.mcg": torch.tensor([7], dtype=torch.int32)}),
            r"experts.3.up_proj.mcg is 0x00000007, the marker of another codebook",
        ),
    ],
)
def test_experts_that_do_not_belong_together(change: Callable[[Pack], object], message: str) -> None:
    pack = Pack()
    change(pack)
    with pytest.raises(CheckpointError, match=message):
        pack.experts()


def test_old_packs_with_sign_words() -> None:
    pack = Pack(codebook="3inst", bits=(3,))
    words = torch.randint(-(2**15), 2**15, (HIDDEN // 16,), dtype=torch.int16)
    for name, linear in list(pack.linears.items()):
        pack.linears[name] = Exl3Linear(linear.k, linear.n, linear.bits, "3inst", True, ())
        for field, size in (("su", linear.k), ("sv", linear.n)):
            pack.tensors[f"{name}.{field}"] = words.repeat(2)[: size // 16]
            del pack.tensors[f"{name}.{field}h"]
    experts = pack.experts()
    assert experts.shared_suh
    bit = np.unpackbits(words.numpy().view(np.uint8), bitorder="little")
    assert experts.suh.tolist() == (1.0 - 2.0 * bit).tolist()


# ---- whole checkpoints
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exl3") / "tiny"
    write_checkpoint(out, "tiny", 1, expert_bits=2.75, **FIELDS)
    return out


def logits(model: Glm53, tokens: list[int], chunk: int) -> torch.Tensor:
    stream = model.open_stream()
    parts = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
    rows = torch.cat([model.forward([Rows(stream, part, len(part))]) for part in parts])
    stream.close()
    return rows


def dense_model(checkpoint: Checkpoint) -> Glm53:
    """Every quantised linear as the float32 matrix it stands for."""
    weights = load_weights(checkpoint.config, CheckpointSource(checkpoint).tensor)
    assert isinstance(weights.layers[1].ffn.experts, PlainExperts)
    return Glm53(checkpoint.config, weights, tokens=256, kv="fp32")


def test_model_of_quantised_experts(folder: Path) -> None:
    tokens = [(37 * i + 11) % 1400 for i in range(60)]
    with Checkpoint.open(folder) as checkpoint:
        seen: list[tuple[int, int]] = []
        model = load_model(checkpoint, tokens=256, kv="fp32", progress=lambda done, total: seen.append((done, total)))
        assert isinstance(model.weights.layers[1].ffn.experts, Exl3Experts)
        assert seen[-1][0] == seen[-1][1]
        decoded = 2 * 128 * 384 * 3 * 4 * 3  # fp16 matrices of 4 experts in two sparse layers and the MTP layer
        assert checkpoint.decoded_nbytes == checkpoint.nbytes + decoded
        dense = dense_model(checkpoint)
    found = logits(model, tokens, 60)
    assert torch.equal(found, logits(model, tokens, 7))
    difference = (found - logits(dense, tokens, 60)).abs()
    assert float(difference.mean()) < 5e-3 and float(difference.mean()) > 0  # fp16 roundings of the experts' inputs
    assert not torch.equal(found, logits(dense, tokens, 60))


def quantise_everything(folder: Path, out: Path) -> None:
    """A copy of a checkpoint in which every matrix but embedding and router is (random) EXL3."""
    out.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    pack, random = Pack(), torch.Generator().manual_seed(3)
    for name in [
        n for n, t in tensors.items() if t.dim() == 2 and not n.endswith(("embed_tokens.weight", "gate.weight"))
    ]:
        outputs, inputs = tensors.pop(name).shape
        k, n = (-(-size // 128) * 128 for size in (inputs, outputs))
        prefix = name.removesuffix(".weight")
        bits = (3, 5, 6)[int(torch.randint(3, (1,), generator=random))]
        pack.add(prefix, k, n, bits)
        tensors |= {key: value for key, value in pack.tensors.items() if key.startswith(f"{prefix}.")}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    for file in folder.glob("*.json"):
        if "index" not in file.name:
            (out / file.name).write_text(file.read_text())


def test_any_linear_may_be_exl3(folder: Path, tmp_path: Path) -> None:
    quantise_everything(folder, tmp_path / "all")
    tokens = [(37 * i + 11) % 1400 for i in range(40)]
    with Checkpoint.open(tmp_path / "all") as checkpoint:
        assert checkpoint.shapes["model.layers.0.self_attn.kv_a_proj_with_mqa"] == (64, 128)
        assert checkpoint.linears["model.layers.0.self_attn.kv_a_proj_with_mqa"].n == 128
        model = load_model(checkpoint, tokens=256, kv="fp32")
        assert isinstance(model.weights.head, Exl3Weight)
        assert isinstance(model.weights.layers[0].attention.a_proj, StackedWeight)
        dense = dense_model(checkpoint)
    found = logits(model, tokens, 40)
    assert torch.equal(found, logits(model, tokens, 1))
    expected = logits(dense, tokens, 40)
    assert float((found - expected).abs().mean()) < 2e-2 * float(expected.std())


def test_files_that_contradict_the_config(folder: Path, tmp_path: Path) -> None:
    quantise_everything(folder, tmp_path / "all")
    file = tmp_path / "all" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.o_proj"

    def refused(change: dict[str, torch.Tensor], config: dict[str, object] | None = None) -> str:
        save_file(tensors | change, file)
        raw = json.loads((folder / "config.json").read_text()) | (config or {})
        (tmp_path / "all" / "config.json").write_text(json.dumps(raw))
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(tmp_path / "all").close()
        return str(caught.value)

    trellis = tensors[f"{name}.trellis"]
    wide = {f"{name}.trellis": trellis.repeat(1, 2, 1), f"{name}.svh": tensors[f"{name}.svh"].repeat(2)}
    assert f"{name}.trellis is a matrix of 256 outputs and 256 inputs; config.json asks for 128 and 256" in refused(
        wide
    )
    assert f"no place for: {name}.bias" in refused({f"{name}.bias": torch.zeros(128).half()})
    extra = {f"{name}.weight": torch.zeros(128, 160).bfloat16()}
    assert f"tensor {name}.weight has no place in an EXL3 linear" in refused(extra)
    layout = {"quant_method": "exl3", "rotation_layout": "shared_h_v1"}
    assert "rotation_layout is 'shared_h_v1'" in refused({}, {"quantization_config": layout})


def test_rotated_inputs_round_once_to_fp16() -> None:
    x, suh = normal(3, 128), normal(128, seed=1).half()
    found = exl3_reference.rotated_inputs(x, suh)
    assert torch.equal(found, found.half().float())
    hadamard = np.array([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]) / np.sqrt(128)
    exact = (x.double() * suh.double()).numpy() @ hadamard
    assert np.all(np.abs(found.numpy() - exact) <= np.abs(exact) * 2.0**-11 + 1e-6)
