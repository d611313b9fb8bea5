# SPDX-License-Identifier: Apache-2.0
"""The random checkpoints: the real layout to the letter, the same bytes every time, never half made."""

import json
import multiprocessing
import shutil
from dataclasses import replace
from math import prod
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from omni_ep import checkpoint
from omni_ep.checkpoint import CheckpointSpec, inventory, make_checkpoint, missing_from, tensors, weights
from omni_ep.checkpoint.config_files import generation_config, model_config
from omni_ep.checkpoint.tokenizer import build_tokenizer
from omni_ep.errors import ConfigurationError

TINY = Path(__file__).parents[1] / "data" / "hunyuan_image3_tiny"
"""A checkpoint in the real layout that this code had no part in; the default spec has its sizes."""

SPEC = CheckpointSpec()


def headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor in the folder's shards."""
    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  a handle, not a mapping
                part = file.get_slice(name)
                assert name not in found
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    return found


def values(folder: Path) -> dict[str, np.ndarray]:
    """Every bf16 tensor as float32, read by hand: NumPy has no bfloat16."""
    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        raw = shard.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                begin, end = (start + offset for offset in entry["data_offsets"])
                words = np.frombuffer(raw[begin:end], dtype="<u2").astype(np.uint32)
                found[name] = (words << 16).view(np.float32).reshape(entry["shape"])
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "made"
    assert make_checkpoint(folder, SPEC)
    return folder


class TestLayout:
    def test_inventory_is_the_real_one(self) -> None:
        real = {name: shape for name, (_, shape) in headers(TINY).items()}
        assert dict(tensors(SPEC)) == real
        assert len(tensors(SPEC)) == len(real) == 320

    def test_shards_hold_the_inventory(self, made: Path) -> None:
        assert headers(made) == headers(TINY)

    def test_index_places_every_tensor(self, made: Path) -> None:
        index = json.loads((made / "model.safetensors.index.json").read_text())
        real = json.loads((TINY / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == real["metadata"]["total_size"] == inventory(SPEC).bytes
        for name, shard in index["weight_map"].items():
            with safe_open(made / shard, framework="numpy") as file:
                assert name in file.keys()  # noqa: SIM118
        assert set(index["weight_map"]) == set(real["weight_map"])

    def test_config_is_the_real_one_without_remote_code(self, made: Path) -> None:
        real = json.loads((TINY / "config.json").read_text())
        del real["auto_map"]
        assert json.loads((made / "config.json").read_text()) == real == model_config(SPEC)
        assert not list(made.glob("*.py"))

    def test_generation_config_is_the_real_one(self, made: Path) -> None:
        real = json.loads((TINY / "generation_config.json").read_text())
        assert json.loads((made / "generation_config.json").read_text()) == real

    def test_longest_picture_fits_the_sequence(self) -> None:
        config = generation_config(replace(SPEC, image_base_size=2048))
        assert config["max_length"] > (2048 // 16) ** 2

    def test_expert_totals_count_routed_experts_only(self) -> None:
        spec = CheckpointSpec(
            num_layers=3, num_experts=5, hidden_size=64, moe_intermediate_size=24, dtype="fp32"
        )
        totals = inventory(spec)
        assert totals.expert_parameters == 3 * 5 * 3 * 64 * 24
        assert totals.expert_bytes == 4 * totals.expert_parameters
        assert totals.parameters == sum(prod(shape) for _, shape in tensors(spec))

    def test_no_shared_expert(self) -> None:
        spec = replace(SPEC, num_shared_experts=0)
        assert not [name for name, _ in tensors(spec) if "shared_mlp" in name]
        assert model_config(spec)["use_mixed_mlp_moe"] is False

    def test_two_shared_experts_are_one_wide_mlp(self) -> None:
        shapes = dict(tensors(replace(SPEC, num_shared_experts=2)))
        assert shapes["model.layers.0.mlp.shared_mlp.gate_and_up_proj.weight"] == (256, 128)
        assert shapes["model.layers.0.mlp.shared_mlp.down_proj.weight"] == (128, 128)

    def test_vae_resampling_follows_the_channels(self) -> None:
        # 4 values become one where only space folds (levels 0 and 1), 8 where time does too.
        shapes = dict(tensors(replace(SPEC, vae_block_channels=(32, 64, 128, 256, 256))))
        assert shapes["vae.encoder.down.0.downsample.conv.weight"] == (16, 32, 3, 3, 3)
        assert shapes["vae.encoder.down.2.downsample.conv.weight"] == (32, 128, 3, 3, 3)
        assert shapes["vae.decoder.up.0.upsample.conv.weight"] == (2048, 256, 3, 3, 3)
        assert shapes["vae.decoder.up.3.upsample.conv.weight"] == (128, 64, 3, 3, 3)
        assert shapes["vae.decoder.conv_out.weight"] == (3, 32, 3, 3, 3)

    def test_equal_widths_need_no_skip_convolution(self) -> None:
        names = dict(tensors(replace(SPEC, patch_embed_hidden_dim=128)))
        assert not [name for name in names if "skip_connection" in name]


class TestShards:
    @pytest.mark.parametrize("count", [1, 2, 7, 319, 320])
    def test_exact_number_in_order(self, count: int) -> None:
        shards = weights.split_into_shards(tensors(SPEC), count)
        assert len(shards) == count
        assert all(shards)
        assert [tensor for shard in shards for tensor in shard] == list(tensors(SPEC))

    def test_even(self) -> None:
        sizes = [
            sum(prod(shape) for _, shape in shard) for shard in weights.split_into_shards(tensors(SPEC), 3)
        ]
        assert max(sizes) < 1.25 * min(sizes)

    def test_more_than_tensors_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigurationError, match=r"^num_shards \(321\) must not exceed the 320 tensors\.$"
        ):
            make_checkpoint(tmp_path / "out", replace(SPEC, num_shards=321))
        assert not list(tmp_path.iterdir())


class TestWeights:
    def test_same_spread_as_the_real_one(self, made: Path) -> None:
        """Kind by kind: what makes the tiny checkpoint's activations and picture sane holds for ours."""
        ours, real = values(made), values(TINY)
        for name, tensor in real.items():
            spread, wanted = float(ours[name].std()), float(tensor.std())
            if tensor.ndim > 1:
                assert spread == pytest.approx(wanted, rel=0.5 if tensor.size < 1000 else 0.15), name
            else:
                # The real ones are exactly 0 and 1, which would hide a bias or norm that was never loaded.
                assert float(np.abs(ours[name] - tensor).max()) < 0.3, name
                assert spread > 0, name

    def test_routed_sum_keeps_its_size_whatever_top_k(self) -> None:
        name, shape = "model.layers.0.mlp.experts.0.down_proj.weight", (128, 64)
        for top_k in (1, 2, 8):
            spec = replace(SPEC, top_k=top_k, dtype="fp32")
            data = np.frombuffer(weights.tensor_bytes(name, shape, spec), dtype="<f4")
            assert data.std() == pytest.approx((2 * top_k / 64) ** 0.5, rel=0.05)

    def test_bf16_is_the_rounded_fp32(self) -> None:
        name, shape = "lm_head.weight", (320, 128)
        exact = np.frombuffer(weights.tensor_bytes(name, shape, replace(SPEC, dtype="fp32")), dtype="<f4")
        words = np.frombuffer(weights.tensor_bytes(name, shape, SPEC), dtype="<u2").astype(np.uint32)
        error = np.abs((words << 16).view(np.float32) - exact)
        assert (error <= np.abs(exact) * 2.0**-8).all()

    def test_bf16_ties_go_to_even(self) -> None:
        bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000], dtype=np.uint32)
        assert weights._bfloat16_words(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF80]


class TestDeterminism:
    def test_same_spec_same_bytes(self, made: Path, tmp_path: Path) -> None:
        make_checkpoint(tmp_path / "again", SPEC)
        assert contents(tmp_path / "again") == contents(made)

    def test_other_seed_other_weights_same_files(self, made: Path, tmp_path: Path) -> None:
        make_checkpoint(tmp_path / "other", replace(SPEC, seed=1))
        ours, theirs = contents(made), contents(tmp_path / "other")
        assert set(ours) == set(theirs)
        assert ours["config.json"] == theirs["config.json"]
        assert all(ours[name] != theirs[name] for name in ours if name.endswith(".safetensors"))

    def test_a_tensor_does_not_depend_on_its_neighbours(self, made: Path, tmp_path: Path) -> None:
        make_checkpoint(tmp_path / "resharded", replace(SPEC, num_shards=5, num_experts=4))
        ours, theirs = values(made), values(tmp_path / "resharded")
        name = "model.layers.1.mlp.experts.3.down_proj.weight"
        assert np.array_equal(ours[name], theirs[name])
        assert not np.array_equal(ours[name], ours[name.replace("experts.3", "experts.2")])


class TestAtomicity:
    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
    def test_crash_midway_leaves_nothing(self, tmp_path: Path, error: type[BaseException]) -> None:
        written = 0

        def crash(size: int) -> None:
            nonlocal written
            written += size
            if written > 3_000_000:
                raise error

        with pytest.raises(error):
            make_checkpoint(tmp_path / "out", SPEC, crash)
        assert not list(tmp_path.iterdir())
        assert make_checkpoint(tmp_path / "out", SPEC)

    def test_not_there_before_it_is_whole(self, tmp_path: Path) -> None:
        seen = []
        make_checkpoint(tmp_path / "out", SPEC, lambda _: seen.append((tmp_path / "out").exists()))
        assert seen == [False] * 320

    def test_progress_adds_up(self, tmp_path: Path) -> None:
        sizes: list[int] = []
        make_checkpoint(tmp_path / "out", SPEC, sizes.append)
        assert sum(sizes) == inventory(SPEC).bytes

    def test_second_call_leaves_it_alone(self, tmp_path: Path) -> None:
        folder = tmp_path / "deep" / "er"
        assert make_checkpoint(folder, SPEC) is True
        before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
        assert make_checkpoint(folder, SPEC) is False
        assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before

    def test_processes_at_once(self, made: Path, tmp_path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        writing = context.Barrier(3)
        makers = [
            context.Process(target=_make_when_all_are_ready, args=(tmp_path, writing)) for _ in range(3)
        ]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join(60)
        assert [maker.exitcode for maker in makers] == [0, 0, 0]
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert contents(tmp_path / "out") == contents(made)

    def test_loser_of_the_race_says_it_was_there(self, made: Path, tmp_path: Path) -> None:
        def other_maker(_: int) -> None:
            if not (tmp_path / "out").exists():
                shutil.copytree(made, tmp_path / "out")

        assert make_checkpoint(tmp_path / "out", SPEC, other_maker) is False
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _make_when_all_are_ready(parent: Path, writing: Barrier) -> None:
    waited = False

    def progress(_: int) -> None:
        # No one goes on before all have begun: each has seen that the folder is not there.
        nonlocal waited
        if not waited:
            writing.wait(60)
            waited = True

    make_checkpoint(parent / "out", SPEC, progress)


class TestSomethingInTheWay:
    def test_a_folder_of_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        with pytest.raises(
            ConfigurationError,
            match=r"is not a complete checkpoint \(config.json is missing\): choose another folder or remove",
        ):
            make_checkpoint(tmp_path, SPEC)
        assert contents(tmp_path) == {"thesis.txt": b"years of work"}

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "out").write_text("mine")
        with pytest.raises(ConfigurationError, match="it is not a folder"):
            make_checkpoint(tmp_path / "out", SPEC)
        assert (tmp_path / "out").read_text() == "mine"

    def test_a_dangling_link(self, tmp_path: Path) -> None:
        (tmp_path / "out").symlink_to(tmp_path / "nowhere")
        with pytest.raises(ConfigurationError, match="is missing"):
            make_checkpoint(tmp_path / "out", SPEC)

    def test_another_checkpoint(self, made: Path) -> None:
        with pytest.raises(ConfigurationError, match="already holds another checkpoint"):
            make_checkpoint(made, replace(SPEC, seed=1))
        assert make_checkpoint(made, SPEC) is False

    def test_the_real_one(self) -> None:
        before = contents(TINY)
        with pytest.raises(ConfigurationError, match="already holds another checkpoint"):
            make_checkpoint(TINY, SPEC)
        assert contents(TINY) == before

    @pytest.mark.parametrize(
        ("name", "damage", "missing"),
        [
            ("tokenizer.json", None, "tokenizer.json is missing"),
            ("config.json", "{", "config.json cannot be read"),
            ("model.safetensors.index.json", "[]", "model.safetensors.index.json cannot be read"),
            ("model-0002-of-0003.safetensors", None, "model-0002-of-0003.safetensors is missing"),
            ("model-0002-of-0003.safetensors", "short", "model-0002-of-0003.safetensors is damaged"),
        ],
    )
    def test_damage_is_named(
        self, made: Path, tmp_path: Path, name: str, damage: str | None, missing: str
    ) -> None:
        shutil.copytree(made, tmp_path / "out")
        if damage is None:
            (tmp_path / "out" / name).unlink()
        elif damage == "short":
            whole = (tmp_path / "out" / name).read_bytes()
            (tmp_path / "out" / name).write_bytes(whole[:-1])
        else:
            (tmp_path / "out" / name).write_text(damage)
        assert missing_from(tmp_path / "out") == missing
        assert missing_from(made) is None

    def test_a_tensor_its_shard_lacks(self, made: Path, tmp_path: Path) -> None:
        shutil.copytree(made, tmp_path / "out")
        index = tmp_path / "out" / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"]["lm_head.weight"] = "model-0003-of-0003.safetensors"
        index.write_text(json.dumps(content))
        assert missing_from(tmp_path / "out") == "model-0003-of-0003.safetensors lacks lm_head.weight"


class TestSpec:
    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"num_layers": 0}, "num_layers must be a whole number from 1 up, not 0."),
            ({"head_dim": 32.0}, "head_dim must be a whole number from 1 up, not 32.0."),
            ({"seed": -1}, "seed must be a whole number from 0 up, not -1."),
            ({"num_shared_experts": -1}, "num_shared_experts must be a whole number from 0 up, not -1."),
            (
                {"num_experts": 1},
                "num_experts must be at least 2, not 1: the model builds a dense MLP instead of one expert.",
            ),
            ({"top_k": 9}, "top_k (9) must not exceed num_experts (8)."),
            (
                {"num_key_value_heads": 3},
                "num_attention_heads (4) must be divisible by num_key_value_heads (3).",
            ),
            ({"head_dim": 30}, "head_dim must be a multiple of 4 for the 2-D rotary embedding, not 30."),
            ({"hidden_size": 100}, "hidden_size must be a multiple of 32 for GroupNorm, not 100."),
            (
                {"patch_embed_hidden_dim": 48},
                "patch_embed_hidden_dim must be a multiple of 32 for GroupNorm, not 48.",
            ),
            ({"image_base_size": 72}, "image_base_size must be a multiple of 16 and at least 32, not 72."),
            ({"image_base_size": 16}, "image_base_size must be a multiple of 16 and at least 32, not 16."),
            (
                {"vae_block_channels": (32, 32)},
                "vae_block_channels must be five numbers, one per VAE level, not (32, 32).",
            ),
            (
                {"vae_block_channels": (32, 48, 32, 32, 32)},
                "vae_block_channels must be multiples of 32 for GroupNorm, not 48.",
            ),
            (
                {"vae_block_channels": (32, 96, 96, 96, 96)},
                "vae_block_channels[0] (32) times 4 must be divisible by vae_block_channels[1] (96) "
                "for the VAE's shortcut.",
            ),
            (
                {"vae_latent_channels": 32},
                "the last of vae_block_channels (32) must be divisible by twice vae_latent_channels (32).",
            ),
            ({"dtype": "fp16"}, "dtype must be one of bf16, fp32, not 'fp16'."),
        ],
    )
    def test_what_the_model_cannot_run(self, change: dict[str, object], sentence: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            replace(SPEC, **change)  # type: ignore[arg-type]
        assert str(caught.value) == sentence


class TestTokenizer:
    @pytest.mark.parametrize(
        "text",
        [
            "a red cube on a table",
            "naïve 猫 🙂\n\ttabs",
            "<|startoftext|>hi<boi><img_size_64><img_ratio_0><timestep><img><img><eoi><|endoftext|><pad>",
            "<cfg><cfg><guidance><timestep_r><joint_img_sep><answer></answer><think></think><recaption></recaption>",
            "<img_ratio_39> <img_ratio_36> <img_size_128> <eoi>",
        ],
    )
    def test_same_ids_as_the_real_one(self, made: Path, text: str) -> None:
        ours = Tokenizer.from_file(str(made / "tokenizer.json"))
        real = Tokenizer.from_file(str(TINY / "tokenizer.json"))
        assert ours.encode(text).ids == real.encode(text).ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text

    def test_whole_vocabulary(self) -> None:
        real = Tokenizer.from_file(str(TINY / "tokenizer.json"))
        assert build_tokenizer(64).get_vocab() == real.get_vocab()

    def test_size_token_follows_the_base_size(self) -> None:
        tokenizer = build_tokenizer(128)
        assert tokenizer.token_to_id("<img_size_128>") == 273
        assert tokenizer.token_to_id("<img_size_64>") is None

    def test_transformers_reads_it(self, made: Path) -> None:
        transformers = pytest.importorskip("transformers")
        ours = transformers.AutoTokenizer.from_pretrained(made)
        real = transformers.AutoTokenizer.from_pretrained(TINY)
        text = "a cube<boi><img_size_64><img_ratio_16><timestep><img><eoi>"
        assert ours.encode(text) == real.encode(text)
        assert ours.added_tokens_encoder == real.added_tokens_encoder
        assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (256, 257, 258)
        assert ours.convert_tokens_to_ids("<img_ratio_0>") == 274


class TestDefault:
    @pytest.fixture(autouse=True)
    def _nowhere(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("OMNI_EP_CACHE", raising=False)

    def test_made_once(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("OMNI_EP_CACHE", str(tmp_path / "cache"))
        sizes: list[int] = []
        folder = checkpoint.default_checkpoint(sizes.append)
        assert folder.parent == tmp_path / "cache"
        assert missing_from(folder) is None
        assert sum(sizes) == inventory(checkpoint.DEMONSTRATION).bytes < 40e6
        assert checkpoint.default_checkpoint(sizes.append) == folder
        assert sum(sizes) == inventory(checkpoint.DEMONSTRATION).bytes

    def test_where(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        name = checkpoint.default_checkpoint_path().name
        assert checkpoint.default_checkpoint_path().parent == tmp_path / "home" / ".cache" / "omni-ep"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert checkpoint.default_checkpoint_path().parent == tmp_path / "home" / ".cache" / "omni-ep"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert checkpoint.default_checkpoint_path() == tmp_path / "xdg" / "omni-ep" / name
        monkeypatch.setenv("OMNI_EP_CACHE", "~/mine")
        assert checkpoint.default_checkpoint_path() == tmp_path / "home" / "mine" / name

    def test_another_spec_or_format_has_another_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = checkpoint.default_checkpoint_path()
        assert checkpoint.default_checkpoint_path(replace(checkpoint.DEMONSTRATION, seed=1)) != name
        monkeypatch.setattr("omni_ep.checkpoint.cache.FORMAT_VERSION", 1000)
        assert checkpoint.default_checkpoint_path() != name
