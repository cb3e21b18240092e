"""Models in folders: what is saved comes back bit for bit, misfits are named, no interruption leaves a mixture."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ggufs import gguf
from qkv.errors import CheckpointError, DTypeError, SizeLimit, ValueOutOfRange
from qkv.models.files import saving
from qkv.models.files.checkpoint import PretrainedModel
from qkv.models.files.config_file import Fields
from tinymodel import Tiny, TinyConfig, same, tiny

SHARD = 100  # bytes: three files for the model here


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


def foreign(folder, model=None, **changed):
    """A folder as another program writes it: no checksums."""
    model = model or tiny()
    folder.mkdir(exist_ok=True)
    tensors = Tiny.file_names(model.config, model.state_dict())
    del tensors["head.weight"]
    tensors = {name: one.contiguous() for name, one in (tensors | changed).items() if one is not None}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_fields()))
    return folder


@pytest.mark.parametrize("limit", [None, SHARD, 1])
def test_what_is_saved_comes_back(limit, tmp_path):
    model = tiny()
    model.steps += 7
    model.save_pretrained(tmp_path, max_shard_bytes=limit)
    back = Tiny.from_pretrained(tmp_path)
    assert same(back, model) and back.config == model.config and not back.training
    assert back.head.weight is back.embedding.weight and isinstance(back.head.weight, nn.Parameter)
    assert all(weight.requires_grad for weight in back.parameters())
    assert back.tokenizer.encode("abc") == [0, 1, 2]
    ids = torch.tensor([[1, 2]])
    assert torch.equal(back(ids), model(ids))


def test_the_files_are_those_that_transformers_has(tmp_path):
    tiny().save_pretrained(tmp_path)
    assert files_of(tmp_path) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["architectures"] == ["Tiny"] and said["dtype"] == "float32"
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt" and set(json.loads(metadata["qkv_checksums"])) == {"tensors", "files", "save"}
    tensors = load_file(tmp_path / "model.safetensors")
    assert "head.weight" not in tensors and tensors["model.h.0.weight"].shape == (4, 4)
    start = (tmp_path / "model.safetensors").read_bytes()[:8]
    assert (8 + int.from_bytes(start, "little")) % 64 == 0


def test_shards_and_their_index_are_those_that_transformers_has(tmp_path):
    tiny().save_pretrained(tmp_path, max_shard_bytes=SHARD)
    shards = [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert [name for name in files_of(tmp_path) if name.endswith(".safetensors")] == shards
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in tiny().state_dict().values()) - 160
    for name, shard in index["weight_map"].items():
        assert name in load_file(tmp_path / shard)


def test_a_model_without_a_tokenizer_and_one_of_mixed_types_are_saved(tmp_path):
    model = tiny()
    model.tokenizer = None
    model.layers[0].half()
    model.save_pretrained(tmp_path)
    assert files_of(tmp_path) == ["config.json", "model.safetensors"]
    assert "dtype" not in json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"one floating-point type; got torch.float\d\d \(.*say dtype= to cast"):
        Tiny.from_pretrained(tmp_path)
    assert Tiny.from_pretrained(tmp_path, dtype=torch.float32).tokenizer is None


def test_tensors_that_share_memory_are_each_written(tmp_path):
    model = tiny()
    packed = torch.randn(8, 4)
    model.layers[0].weight = nn.Parameter(packed[:4])
    model.layers[1].weight = nn.Parameter(packed[4:])
    model.save_pretrained(tmp_path)
    assert same(Tiny.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_are_cast_and_whole_numbers_are_not(dtype, tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    back = Tiny.from_pretrained(tmp_path, dtype=dtype)
    assert {weight.dtype for weight in back.parameters()} == {dtype} and back.steps.dtype == torch.int64
    assert torch.equal(back.embedding.weight, model.embedding.weight.to(dtype))
    back.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert same(Tiny.from_pretrained(tmp_path / "again"), back)


def test_a_dtype_that_is_none_is_refused(tmp_path):
    for wrong in (torch.int8, "float32"):
        with pytest.raises(DTypeError, match="`dtype` must be a floating-point type of torch; got"):
            Tiny.from_pretrained(tmp_path, dtype=wrong)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what is mapped")
def test_weights_are_mapped_and_not_copied(tmp_path):
    model = tiny(vocabulary=1000, width=64)
    model.save_pretrained(tmp_path)
    back = Tiny.from_pretrained(tmp_path)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    ranges = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in maps]
    for weight in (back.embedding.weight, back.layers[1].bias):
        assert any(begin <= weight.data_ptr() < end for begin, end in ranges) and weight.data_ptr() % 64 == 0
    with torch.no_grad():
        back.embedding.weight += 1  # the pages that are written become ours alone
    assert same(Tiny.from_pretrained(tmp_path), model)


def test_folders_of_other_programs_are_read(tmp_path):
    assert same(Tiny.from_pretrained(foreign(tmp_path)), tiny())
    assert same(Tiny.from_pretrained(foreign(tmp_path, **{"model.mask": torch.ones(2, 2, dtype=torch.bool)})), tiny())


def test_both_names_of_a_tied_weight_are_read(tmp_path):
    model = tiny()
    back = Tiny.from_pretrained(foreign(tmp_path, **{"head.weight": model.embedding.weight.detach()}))
    assert back.head.weight is back.embedding.weight and same(back, model)
    renamed = {"head.weight": model.embedding.weight.detach(), "embedding.weight": None}
    back = Tiny.from_pretrained(foreign(tmp_path, **renamed))
    assert back.head.weight is back.embedding.weight and same(back, model)


MISFITS = {
    "missing": (
        {"model.h.1.bias": None},
        "must hold exactly the model's tensors; missing: 'model.h.1.bias'",
    ),
    "unknown": ({"model.h.7.bias": torch.ones(4)}, "exactly the model's tensors; unknown: 'model.h.7.bias'"),
    "both": (
        {"model.h.1.bias": None, "model.h.1.Bias": torch.ones(4)},
        "missing: 'model.h.1.bias'; unknown: 'model.h.1.Bias'",
    ),
    "many": (
        {f"x{n}": torch.ones(1) for n in range(5)},
        "unknown: 'x0', 'x1', 'x2' and 2 more",
    ),
    "another shape": (
        {"model.h.0.bias": torch.ones(5)},
        "'model.safetensors' must hold 'model.h.0.bias' as (4,), by the config; got (5,)",
    ),
    "another rank": (
        {"model.h.0.bias": torch.ones(4, 1)},
        "'model.h.0.bias' as (4,), by the config; got (4, 1)",
    ),
    "whole numbers": (
        {"model.h.0.bias": torch.ones(4, dtype=torch.int32)},
        "must hold 'model.h.0.bias' as floating-point numbers; got torch.int32; convert the file",
    ),
    "eight bits": (
        {"model.h.0.bias": torch.ones(4).to(torch.float8_e4m3fn)},
        "must hold 'model.h.0.bias' as floating-point",
    ),
    "a float for a count": ({"steps": torch.ones(1)}, "must hold 'steps' as torch.int64; got torch.float32"),
    "another float": ({"model.h.0.bias": torch.ones(4).half()}, "must hold its weights in one floating-point type"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_tensors_that_do_not_fit_the_config_are_refused(misfit, tmp_path):
    changed, said = MISFITS[misfit]
    with pytest.raises(CheckpointError) as caught:
        Tiny.from_pretrained(foreign(tmp_path, **changed))
    assert said in str(caught.value) and "model.safetensors" in str(caught.value)


class Cutting(Tiny):
    """Renames by cutting what it may not find, as some models must."""

    @staticmethod
    def own_names(config, tensors):
        first, second = tensors["packed"].reshape(2, 4)
        return {"layers.0.bias": first, "layers.1.bias": second}

    @staticmethod
    def file_names(config, tensors):
        return {"unrelated": next(iter(tensors.values()))}


def test_a_model_that_cannot_cut_what_it_gets_names_the_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"safetensors' must hold the model's tensors; 'packed' is not there"):
        Cutting.from_pretrained(foreign(tmp_path))
    with pytest.raises(CheckpointError, match=r"safetensors' must hold the model's tensors in the shapes of its"):
        Cutting.from_pretrained(foreign(tmp_path, packed=torch.ones(9)))
    with pytest.raises(CheckpointError, match=r"exactly the model's tensors; missing: 'unrelated'"):
        Cutting.from_pretrained(foreign(tmp_path, packed=torch.ones(8)))


class Plain(Tiny):
    """A model whose names are those of its file."""

    own_names = staticmethod(PretrainedModel.own_names)
    file_names = staticmethod(PretrainedModel.file_names)


class Refusing(Plain):
    @staticmethod
    def own_names(config, tensors):
        raise CheckpointError("`steps` must be even; got 7; count again")


def test_names_stay_as_they_are_and_a_models_own_refusal_is_passed_on(tmp_path):
    model = Plain(TinyConfig())
    model.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict()) - {"head.weight"}
    assert same(Plain.from_pretrained(tmp_path), model)
    with pytest.raises(CheckpointError, match=r"^`steps` must be even; got 7; count again$"):
        Refusing.from_pretrained(tmp_path)


class Deciding(Tiny):
    """Learns from the names in the file how many layers it has."""

    @staticmethod
    def config_for(config, names):
        return TinyConfig(layers=sum(name.startswith("model.h.") and name.endswith(".bias") for name in names))


def test_a_model_may_learn_from_the_names_in_the_file(tmp_path):
    foreign(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    back = Deciding.from_pretrained(tmp_path)
    assert back.config.layers == 2 and same(back, tiny())


def test_a_model_is_put_together_from_tensors(tmp_path):
    model = tiny()
    tensors = {name: one for name, one in model.state_dict().items() if name != "head.weight"}
    back = Tiny.assembled(model.config, tensors, Path("here"), dtype=torch.float64)
    assert back.embedding.weight.dtype == torch.float64 and not back.training
    with pytest.raises(CheckpointError, match="'here' must hold exactly the model's tensors; missing: 'steps'"):
        Tiny.assembled(model.config, {n: one for n, one in tensors.items() if n != "steps"}, Path("here"))


def test_a_model_without_a_reader_for_gguf_says_so(tmp_path):
    (tmp_path / "a.gguf").write_bytes(gguf({"general.architecture": "llama"}, {}))
    for path in (tmp_path, tmp_path / "a.gguf"):
        with pytest.raises(CheckpointError, match=r"Tiny must be read from a folder .* a GGUF file of 'llama' with 0"):
            Tiny.from_pretrained(path)
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"must hold one .gguf file; got 2, 'a.gguf' first; name the file"):
        Tiny.from_pretrained(tmp_path)


# Configs.
def fields(**table):
    return Fields(Path("config.json"), table)


def test_fields_give_values_of_their_types():
    said = fields(
        n=3, f=3.0, x=1.5, yes=True, name="a", ids=[1, 2], none=None, inner={"n": 1, "deep": {"x": "no"}}, ls=["a"]
    )
    assert said.integer("n") == said.integer("f") == 3 and type(said.integer("f")) is int
    assert said.number("n") == 3.0 and type(said.number("n")) is float and said.number("x") == 1.5
    assert said.flag("yes") is True and said.text("name") == "a" and said.texts("ls") == ("a",)
    assert said.integers("ids") == (1, 2) and said.integers("n") == (3,)
    assert said.one_of("name", "a", "b") == "a" and said.has("n") and not said.has("none") and not said.has("gone")
    for read in (said.integer, said.number, said.flag, said.text, said.integers, said.texts):
        assert read("none", 5) == read("gone", 5) == 5 and read("gone", None) is None
    assert said.one_of("gone", "a", default=None) is None
    assert said.part("inner").integer("n") == 1 and said.part("gone").integer("n", 2) == 2


NO_FIELDS = {
    "absent": (lambda f: f.integer("gone"), "`gone` in 'config.json' must be given; it is not there"),
    "null": (lambda f: f.integer("none"), "`none` in 'config.json' must be given; got None"),
    "a text for a number": (lambda f: f.integer("name"), "`name` in 'config.json' must be an integer; got 'a'"),
    "a half": (lambda f: f.integer("x"), "`x` in 'config.json' must be an integer; got 1.5"),
    "a truth for a number": (lambda f: f.integer("yes"), "must be an integer; got True"),
    "a count beyond 63 bits": (lambda f: f.integer("huge"), "must be at most 16,777,216; got 1000000"),
    "infinite": (lambda f: f.number("inf"), "must be a finite number; got inf"),
    "a truth for a float": (lambda f: f.number("yes"), "must be a finite number; got True"),
    "a number for a truth": (lambda f: f.flag("n", None), "`n` in 'config.json' must be true or false; got 1"),
    "a number for a text": (lambda f: f.text("n"), "must be a text; got 1"),
    "a list of texts": (lambda f: f.integers("ls"), "must be an integer or a list of integers; got ['a']"),
    "a text for a list": (lambda f: f.texts("name"), "must be a list of texts; got 'a'"),
    "another": (
        lambda f: f.one_of("name", "b", "c"),
        "`name` in 'config.json' must be 'b' or 'c'; got 'a'",
    ),
    "true is not 1": (lambda f: f.one_of("yes", 1), "must be 1; got True"),
    "inside": (lambda f: f.part("inner").integer("n"), "`inner.n` in 'config.json' must be an integer; got 'x'"),
    "no object": (lambda f: f.part("n"), "`n` in 'config.json' must be an object; got 1"),
}


@pytest.mark.parametrize("wrong", NO_FIELDS)
def test_fields_of_other_types_are_refused_by_name(wrong):
    read, said = NO_FIELDS[wrong]
    table = {"none": None, "name": "a", "x": 1.5, "yes": True, "n": 1, "huge": 10**20, "inf": float("inf"), "ls": ["a"]}
    with pytest.raises(CheckpointError) as caught:
        read(fields(**table, inner={"n": "x"}))
    assert said in str(caught.value)


# Saving.
def test_a_folder_can_be_saved_over(tmp_path):
    small, large = tiny(), tiny(layers=3)
    for model, limit in ((large, None), (small, SHARD), (large, SHARD), (small, None)):
        model.save_pretrained(tmp_path, max_shard_bytes=limit)
        assert same(Tiny.from_pretrained(tmp_path), model)
    assert files_of(tmp_path) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def test_a_model_can_be_saved_over_the_file_that_it_is_mapped_from(tmp_path):
    tiny().save_pretrained(tmp_path)
    back = Tiny.from_pretrained(tmp_path)
    back.save_pretrained(tmp_path)
    assert same(back, tiny()) and same(Tiny.from_pretrained(tmp_path), tiny())


class Killed(BaseException):
    """The program ends here."""


def steps_of(monkeypatch, end):
    """Let the file system end the program at its n-th change."""
    count = [0]

    def counted(call):
        def step(*args, **kwargs):
            count[0] += 1
            if count[0] == end:
                raise Killed
            return call(*args, **kwargs)

        return step

    for owner, name in ((Path, "replace"), (Path, "unlink"), (os, "fsync"), (saving, "_write")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize("limits", [(None, None), (SHARD, None), (None, SHARD), (SHARD, SHARD)])
def test_a_save_that_is_killed_leaves_the_old_model_or_none(limits, tmp_path, monkeypatch):
    """At every step of it; the cleaning up is then cut off too. The next save puts all in order."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # quick: nobody pulls the plug
    before, after = tiny(), tiny()
    with torch.no_grad():
        after.embedding.weight += 1
    olds = news = 0
    for end in range(1, 200):
        folder = tmp_path / str(end)
        before.save_pretrained(folder, max_shard_bytes=limits[0])
        with pytest.MonkeyPatch.context() as patch:
            steps_of(patch, end)
            patch.setattr(saving, "_clean", lambda hidden: None)
            try:
                after.save_pretrained(folder, max_shard_bytes=limits[1])
            except Killed:
                pass
            else:
                break
        try:
            found = Tiny.from_pretrained(folder)
        except CheckpointError as error:
            assert "'config.json' must be a file that can be read" in str(error)  # noqa: PT017
        else:
            olds += same(found, before)
            news += same(found, after)
            assert same(found, before) or same(found, after)
        after.save_pretrained(folder, max_shard_bytes=limits[1])
        assert same(Tiny.from_pretrained(folder), after) and not list(folder.glob(".*"))
    assert olds > 8 and news <= 2 and end > 15


def test_a_disk_that_is_full_leaves_the_old_model_and_no_rests(tmp_path, monkeypatch):
    tiny().save_pretrained(tmp_path)
    before = files_of(tmp_path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tiny(layers=3).save_pretrained(tmp_path)
    monkeypatch.undo()
    assert files_of(tmp_path) == before and same(Tiny.from_pretrained(tmp_path), tiny())


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    model = tiny()
    with pytest.raises(ValueOutOfRange, match="`max_shard_bytes` must be at least 1; got 0; None writes one file"):
        model.save_pretrained(tmp_path / "a", max_shard_bytes=0)
    model.steps = model.steps.to(torch.complex64)
    with pytest.raises(DTypeError, match=r"`steps` must have a type that safetensors knows; got torch.complex64"):
        model.save_pretrained(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_too_many_tensors_for_one_header_ask_for_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "MAX_METADATA", 1500)
    with pytest.raises(SizeLimit, match=r"at most 1,500 bytes of text beside its 6 tensors; .*pass max_shard_bytes="):
        tiny().save_pretrained(tmp_path)
    assert files_of(tmp_path) == []


def test_gradients_devices_and_views_do_not_matter_for_saving(tmp_path):
    model = tiny()
    model.layers[0].weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    model(torch.tensor([[1]])).sum().backward()
    model.save_pretrained(tmp_path)
    assert same(Tiny.from_pretrained(tmp_path), model)


def test_a_config_that_was_edited_is_read_without_verification(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("}", ', "mine": 1}'))
    with pytest.raises(CheckpointError, match=r"'config.json' must be as it was saved .* or pass verify=False if you"):
        Tiny.from_pretrained(tmp_path)
    assert same(Tiny.from_pretrained(tmp_path, verify=False), model)


def test_a_folder_of_links_into_a_cache_is_read(tmp_path):
    """As the cache of Hugging Face keeps it: snapshots/<revision>/ links to blobs/; no other place will do."""
    tiny().save_pretrained(tmp_path / "blobs", max_shard_bytes=SHARD)
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert same(Tiny.from_pretrained(snapshot), tiny())
    shutil.move(tmp_path / "blobs", tmp_path / "elsewhere")
    for file in (tmp_path / "elsewhere").iterdir():
        (snapshot / file.name).unlink()
        (snapshot / file.name).symlink_to(tmp_path / "elsewhere" / file.name)
    with pytest.raises(CheckpointError, match=r"'model-00001-of-00004.safetensors' must lie in the folder"):
        Tiny.from_pretrained(snapshot)
