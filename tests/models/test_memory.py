"""What a model takes in memory: as its plan says, within its bound, and no pages of the file that nobody reads."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import opweave as ow
from tests.support.small_models import available, make_folder

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")
models = pytest.importorskip("opweave_models")
placement = pytest.importorskip("opweave_models.placement")

DEVICES = ("cpu", "opencl:0", "torch:cpu", "ort:cpu")


@pytest.fixture(scope="module", params=["q8_0", "q4_0"])
def path(request, tmp_path_factory):
    from opweave_models.writing import write_gguf

    folder = tmp_path_factory.mktemp("llama")
    make_folder("llama", folder, hidden_size=256, intermediate_size=1024)
    write_gguf(folder, folder / "model.gguf", request.param)
    return folder / "model.gguf"


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    make_folder("mixtral", folder, hidden_size=256, intermediate_size=1024)
    return folder


def test_a_plan_reads_no_experts(experts):
    def described():
        file = models.open_model(experts)
        for kind in (None, "q8_0"):
            models.plan_placement(file, "cpu", context=64, quantize=kind)
        assert placement.summary(file)["weights"]
        assert file.label
        file.release()

    assert taken(described)[1] < models.open_model(experts).nbytes / 20


@pytest.mark.parametrize("quantize", [None, "q8_0"])
@pytest.mark.parametrize("device", DEVICES)
def test_experts_are_in_memory_once(experts, device, quantize):
    """Stacked or rounded, on the host or on a device with memory of its own, which is not counted here."""
    own = not available(device).default_buffer_type.is_host
    options = {"context": 64, "quantize": quantize, "precision": "exact"}

    def computed():
        llm = models.load(experts, device, **options)
        with llm.session() as session:
            session.feed(list(range(5, 40)))
            return llm, session.logits()

    (llm, logits), _, held = taken(computed)
    (share,) = llm.plan.shares
    assert held < (0.2 * share.weights if own else 1.1 * share.total)
    with llm, models.load(experts, "host", **options) as other, other.session() as session:
        session.feed(list(range(5, 40)))
        np.testing.assert_allclose(logits, session.logits(), atol=0.001 * np.abs(logits).max())


def taken(call):
    """The result of the second of two calls, and the memory of arrays: at most meanwhile, and after it."""
    call()
    gc.collect()
    tracemalloc.start()
    try:
        result = call()
        gc.collect()
        held, peak = tracemalloc.get_traced_memory()
        return result, peak, held
    finally:
        tracemalloc.stop()


def packed_by_onnx_runtime(device):
    if device != "ort:cpu":
        return 0
    from opweave_ort.sessions import SESSIONS

    gc.collect()
    return SESSIONS.packed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("repack", [None, "1500KiB", "1GiB"])
def test_the_plan_says_what_is_taken(path, device, repack):
    available(device)
    before = packed_by_onnx_runtime(device)
    with models.load(path, device, context=64, repack=repack) as llm, llm.session() as session:
        session.feed(list(range(5, 40)))
        session.logits()
        session.feed([7])
        session.logits()
        (share,) = llm.plan.shares
        kinds = ow.device(device).buffer_types
        leaves = [w.leaf for w in llm.weights.values()]
        if device == "ort:cpu":  # which has no products but with weights that it packs
            copies = packed_by_onnx_runtime(device) - before
        else:
            if repack is None:
                most = 1.5 * share.weights - llm.plan.tokenizer
                assert share.total <= most or not share.copies
            else:
                assert share.copies <= placement.parse_bytes(repack)
            copies = sum(kind.alloc_size(w) for kind in kinds for w in llm.weights.values() if kind in w.leaf.copies)
            assert sum(w.nbytes for w, leaf in zip(llm.weights.values(), leaves, strict=True)
                       if any(kind in leaf.copies for kind in kinds)) == share.replaced  # fmt: skip
        assert copies == pytest.approx(share.copies, rel=0.05)
        batch = np.zeros((1, 1), np.int64)
        use = llm.step.program(batch, batch, batch, batch, np.zeros(1, np.int64), 64).memory[device]
        assert use.states == pytest.approx(share.cache, rel=0.05)
        taken = sum(w.nbytes for w in llm.weights.values()) + copies - share.replaced + use.states + use.temporaries
        assert share.weights + share.copies - share.replaced + share.cache == pytest.approx(
            taken - use.temporaries, rel=0.05
        )
        prompt = np.zeros((1, 64), np.int64)
        use = llm.step.program(prompt, prompt, prompt, batch, np.zeros(1, np.int64), 64).memory[device]
        assert use.temporaries == pytest.approx(share.compute, rel=0.05)


def test_each_of_several_devices_makes_the_copies_that_the_plan_says(path, monkeypatch):
    devices = ("torch:cpu", "ort:cpu")
    for name in devices:
        available(name)
    for name, limit in (("TORCH", 1 << 18), ("ORT", 0)):
        monkeypatch.setenv(f"OPWEAVE_{name}_CACHE_BYTES", str(limit))
    before = packed_by_onnx_runtime("ort:cpu")
    with models.load(path, devices, context=64, split=(1, 1)) as llm, llm.session() as session:
        session.feed(list(range(5, 40)))
        session.logits()
        first, second = llm.plan.shares
        assert first.copies > 0
        assert packed_by_onnx_runtime("ort:cpu") - before <= second.copies  # the first takes products from it
        for share in (first,):
            weights = [w for w in llm.weights.values() if llm.plan.placed[w.leaf.name] == share.device]
            kinds = ow.device(share.device).buffer_types
            copies = sum(kind.alloc_size(w) for kind in kinds for w in weights if kind in w.leaf.copies)
            assert copies == pytest.approx(share.copies, rel=0.05)
            assert copies <= share.repack


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("context", [7, 65, 129, 256])
def test_the_plan_says_what_several_sequences_take(path, context, device):
    """On `cpu` they share blocks, elsewhere each has memory of its own."""
    available(device)
    with models.load(path, device, context=context, sequences=3) as llm:
        cache, (share,) = llm.decoder_cache(), llm.plan.shares
        states = [*cache.keys, *cache.values]
        assert sum(state.nbytes for state in states) == pytest.approx(share.cache, rel=0.05)
        most = 0
        for rows, tokens in ((1, 1 << (min(512, context) - 1).bit_length()), (3, 1)):
            *arrays, reach = cache.specs(rows, tokens, cache.reaches[-1])
            program = llm.step.program(*[np.zeros(array.shape, np.int64) for array in arrays], reach)
            most = max(most, program.memory[device].temporaries)
        assert most == pytest.approx(share.compute, rel=0.05)


def test_more_copies_are_made_where_they_are_asked_for(path):
    available("torch:cpu")
    plans = [models.plan_placement(models.open_model(path), "torch:cpu", context=64, repack=n) for n in (None, "1GiB")]
    few, many = (plan.shares[0] for plan in plans)
    assert few.copies < many.copies == many.wanted == few.wanted
    assert few.total < many.total
    assert "repack" not in str(plans[1])
    said = re.search(r"repack='(\w+)' makes all", str(plans[0]))
    assert said is not None
    all_of_them = models.plan_placement(models.open_model(path), "torch:cpu", context=64, repack=said[1])
    assert all_of_them.shares[0].copies == many.copies


@pytest.mark.parametrize("device", DEVICES)
def test_half_weights_that_a_device_widens_are_counted(device, tmp_path):
    """The output matrix is the largest one, of a step of one token too."""
    available(device)
    make_folder("llama", tmp_path, hidden_size=256, vocab_size=32000)
    with models.load(tmp_path, device, context=64, quantize="f16") as llm, llm.session() as session:
        session.feed(list(range(5, 40)))
        session.logits()
        (share,) = llm.plan.shares
        batch = np.zeros((1, 1), np.int64)
        most = 0
        for tokens in (np.zeros((1, 64), np.int64), batch):
            use = llm.step.program(tokens, tokens, tokens, batch, np.zeros(1, np.int64), 64).memory[device]
            most = max(most, use.temporaries)
        assert most == pytest.approx(share.compute, rel=0.05)


@pytest.mark.parametrize(("context", "kv"), [(64, "f16"), (2048, "f16"), (2048, "f32"), (2048, "q8_0")])
@pytest.mark.parametrize("device", DEVICES)
def test_attention_over_a_long_context_is_counted(device, context, kv, tmp_path):
    available(device)
    make_folder("llama", tmp_path, max_position_embeddings=2048, head_dim=64)
    with models.load(tmp_path, device, context=context, kv=kv) as llm:
        tokens, one = np.zeros((1, min(context, 512)), np.int64), np.zeros((1, 1), np.int64)
        use = llm.step.program(tokens, tokens, tokens, one, np.zeros(1, np.int64), context).memory[device]
        assert use.temporaries == pytest.approx(llm.plan.shares[0].compute, rel=0.05)


@pytest.mark.parametrize("device", ["cpu", "opencl:0", "torch:cpu"])
@pytest.mark.parametrize("context", [33, 100, 257, 300])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_contexts_of_any_length_take_what_the_plan_says(kind, context, device, tmp_path):
    """In steps, which are padded to powers of two, and in all, after prompts of any length."""
    available(device)
    make_folder(kind, tmp_path, max_position_embeddings=512, hidden_size=128, num_hidden_layers=4)
    with models.load(tmp_path, device, context=context, kv="f32") as llm:
        cache, (share,) = llm.decoder_cache(), llm.plan.shares
        tokens = 1 << (context - 1).bit_length()
        *arrays, reach = cache.specs(1, tokens, cache.reaches[-1])
        program = llm.step.program(*[np.zeros(array.shape, np.int64) for array in arrays], reach)
        assert program.memory[device].temporaries == pytest.approx(share.compute, rel=0.05)
        for length in (7, context // 2, 3, context - 1):
            with llm.session() as session:
                session.feed([5] * length)
                session.logits()
        assert llm.step.scheduler.buffer_size(device) == pytest.approx(share.compute, rel=0.05)


def test_keys_lie_where_their_attention_was_moved(path):
    file = models.open_model(path)
    plain = models.plan_placement(file, "cpu", context=64)
    with models.load(file, ["cpu", "host"], context=64, patterns={"*": "host"}) as llm:
        assert llm.plan.devices == ("host",)
        assert llm.plan.shares[0].cache == plain.shares[0].cache
        with llm.session() as session:
            session.feed([5, 6, 7])
            moved = session.logits()
        assert {state.leaf.device for state in llm.decoder_cache().keys} == {"host"}
    with models.load(file, ["cpu", "host"], context=64, patterns={"blk.0.attn_*": "host"}) as llm:
        caches = {share.device: share.cache for share in llm.plan.shares}
        assert caches == {"host": plain.shares[0].cache // llm.config.layers,
                          "cpu": plain.shares[0].cache - plain.shares[0].cache // llm.config.layers}  # fmt: skip
        assert llm.plan.placed["blk.0.ffn_up.weight"] == "cpu"
        with llm.session() as session:
            session.feed([5, 6, 7])
            np.testing.assert_allclose(session.logits(), moved, atol=0.05)
        assert llm.decoder_cache().keys[0].leaf.device == "host"


@pytest.mark.parametrize("repack", [None, "1GiB"])
def test_copies_are_made_within_a_budget(path, repack):
    available("torch:cpu")
    file = models.open_model(path)
    free = models.plan_placement(file, "torch:cpu", context=64, repack="1GiB").shares[0]
    budget = (free.total + free.weights + free.cache + free.compute) // 2
    share = models.plan_placement(file, "torch:cpu", context=64, repack=repack, memory={"torch:cpu": budget}).shares[0]
    assert share.total <= budget
    assert share.copies < free.copies


@pytest.mark.parametrize("chunk", [0, -1, 1.5, "a", None])
def test_a_chunk_has_tokens(path, chunk):
    with pytest.raises(ow.BoundsError, match="chunk"):
        models.plan_placement(models.open_model(path), "cpu", context=64, chunk=chunk)


def copies_of(llm, device):
    """Bytes of copies of weights that a device has: packed by its library, in its special memory, and rounded."""
    kinds = ow.device(device).buffer_types
    leaves = [(w, w.leaf) for w in llm.weights.values()]
    special = sum(kind.alloc_size(w) for w, leaf in leaves for kind in kinds if kind in leaf.copies)
    return special + sum(made.nbytes for _, leaf in leaves for made in leaf.converted.values())


@pytest.mark.parametrize("options", [
    {}, {"repack": "1GiB"}, {"precision": "exact"}, {"quantize": "bf16"}, {"precision": "bf16"},
    {"precision": {"*expert_linear*": "bf16"}}, {"precision": {"layer1/*": "bf16"}, "repack": "1GiB"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("device", DEVICES)
def test_the_plan_says_what_copies_of_experts_take(experts, device, options):
    available(device)
    before = packed_by_onnx_runtime(device)
    with models.load(experts, device, context=64, **options) as llm, llm.session() as session:
        for tokens in (list(range(5, 40)), [7]):
            session.feed(tokens)
            session.logits()
        (share,) = llm.plan.shares
        made = copies_of(llm, device) + packed_by_onnx_runtime(device) - before
        assert made == pytest.approx(share.copies, rel=0.05)


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("device", DEVICES)
def test_temporary_values_on_the_host_are_counted(device, kv, tmp_path):
    shares_memory = available(device).default_buffer_type.is_host
    make_folder("llama", tmp_path, max_position_embeddings=4096, head_dim=64)
    with models.load(tmp_path, device, context=4096, kv=kv) as llm:
        share, *others = llm.plan.shares
        planned = share.host if shares_memory else sum(other.total for other in others)
        tokens, one = np.zeros((1, 512), np.int64), np.zeros((1, 1), np.int64)
        use = llm.step.program(tokens, tokens, tokens, one, np.zeros(1, np.int64), 4096).memory
        assert planned == pytest.approx(use["host"].temporaries if "host" in use else 0, rel=0.05)
        assert llm.step.scheduler.buffer_size("host") == pytest.approx(planned, rel=0.05)
        assert share.total >= share.cache + share.compute + share.host


def test_temporary_values_on_the_host_need_room_in_its_memory(path, monkeypatch):
    file, host = models.open_model(path), 1 << 22
    for name in DEVICES:
        own = not available(name).default_buffer_type.is_host
        monkeypatch.setattr(placement, "temporaries", lambda *_, name=name: {name: 1000, "host": host})
        made = models.plan_placement(file, name, context=64, repack=0)
        assert [share.device for share in made.shares] == ([name, "host"] if own else [name])
        assert ("host" in str(made).split()) is own
        budgets = {share.device: share.total for share in made.shares}
        fits = models.plan_placement(file, name, context=64, repack=0, memory=budgets)
        assert [share.total for share in fits.shares] == list(budgets.values())
        last = list(budgets)[-1]
        with pytest.raises(ow.AllocationError, match="budget"):
            models.plan_placement(file, name, context=64, repack=0, memory={**budgets, last: budgets[last] - 1})


@pytest.mark.parametrize("options", [{}, {"experts": "host"}, {"kv": "q8_0", "sequences": 2}], ids=str)
@pytest.mark.parametrize("devices", [("cpu", "host"), ("ort:cpu", "torch:cpu"), ("torch:cpu", "ort:cpu"),
                                     ("opencl:0", "ort:cpu"), ("torch:cpu", "cpu", "ort:cpu")], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_what_a_plan_takes_is_enough_for_a_plan(kind, devices, options, tmp_path):
    for name in devices:
        available(name)
    make_folder(kind, tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
    file, options = models.open_model(tmp_path), {"context": 128, **options}
    split = range(1, len(devices) + 1)
    made = models.plan_placement(file, devices, split=split, **options)
    budgets = {share.device: share.total for share in made.shares}
    again = models.plan_placement(file, devices, memory=budgets, **options)
    assert all(share.total <= budgets[share.device] for share in again.shares)


TAKEN = """
import gc, sys
import numpy as np
import opweave as ow
import opweave_models

def anonymous():
    gc.collect()
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous"))

def loaded(path, **options):
    llm = opweave_models.load(path, sys.argv[3], **options)
    with llm.session() as session:
        for tokens in (list(range(5, 65)), [5]):
            session.feed(tokens)
            session.logits()
    gc.collect()
    llm.file.release()
    return llm

options = {"context": 128, **eval(sys.argv[4])}
with loaded(sys.argv[1], **options) as llm:
    file = llm.file
del llm
gc.collect()  # what is freed behind the release stays in the process
file.release()
before = anonymous()
llm = loaded(sys.argv[2], **options)
(share,) = llm.plan.shares
stacked = sum(w.nbytes for name, w in llm.weights.items() if "_exps" in name)
mapped = 0 if "quantize" in options else share.weights - share.replaced - stacked
print(share.total + llm.plan.tokenizer - mapped, anonymous() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="this system does not tell what is taken")
@pytest.mark.parametrize("options", [
    {}, {"quantize": "f16"}, {"precision": {"*expert_linear*": "bf16"}}, {"kv": "q8_0"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "torch:cpu", "ort:cpu"])
def test_a_process_takes_what_the_plan_says(experts, device, options, tmp_path):
    """Beside objects of Python and of libraries and what these compile, which are up to 16 MiB here."""
    available(device)
    make_folder("mixtral", tmp_path, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_local_experts=8)
    command = [sys.executable, "-c", TAKEN, str(experts), str(tmp_path), device, str(options)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    planned, taken = map(int, run.stdout.split())
    assert abs(taken - planned) < 0.05 * planned + (16 << 20), (planned, taken)


@pytest.mark.parametrize("wrong", ["foo", None, 5])
def test_a_plan_takes_no_precision_that_there_is_not(path, wrong):
    with pytest.raises(ow.UnknownNameError):
        models.plan_placement(models.open_model(path), "cpu", context=64, precision=wrong)


CODE = """
import sys
import numpy as np
import opweave_models

def mapped():
    found, inside = 0, False
    for line in open("/proc/self/smaps"):
        first = line.split()[0]
        if not first.endswith(":"):
            inside = line.rstrip().endswith("model.gguf")
        elif inside and first == "Rss:":
            found += int(line.split()[1]) << 10
    return found

with opweave_models.load(sys.argv[1], sys.argv[2], context=64, repack="1GiB") as llm, llm.session() as session:
    session.feed([5, 6, 7])
    before = session.logits()
    after_prompt = mapped()
    llm.file.release()
    released = mapped()
    print(llm.file.nbytes, after_prompt, released)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not tell which pages are there")
@pytest.mark.parametrize(("device", "copied"), [("cpu", False), ("torch:cpu", True), ("opencl:0", True)])
def test_pages_that_were_copied_are_let_go_of(path, device, copied):
    available(device)
    run = subprocess.run([sys.executable, "-c", CODE, str(path), device], capture_output=True, text=True, check=True)
    size, after_prompt, released = map(int, run.stdout.split())
    assert size > 1 << 20
    assert released == 0
    assert after_prompt < size // 4 if copied else after_prompt > size // 2


WRONG = [
    ({"context": 0}, ow.BoundsError), ({"context": -5}, ow.BoundsError), ({"context": 257}, ow.BoundsError),
    ({"sequences": 0}, ow.BoundsError), ({"sequences": 1025}, ow.BoundsError), ({"kv": "i32"}, ow.DTypeError),
    ({"kv": "q4_k"}, ow.LayoutError), ({"kv": "nope"}, ow.UnknownNameError), ({"quantize": "i32"}, ow.DTypeError),
    ({"quantize": "iq1_s"}, ow.DTypeError), ({"devices": "cpu,cpu"}, ow.SchedulerError),
    ({"devices": ["cpu", "CPU"]}, ow.SchedulerError),
    ({"devices": 5}, ow.SchedulerError), ({"devices": None}, ow.SchedulerError),
    ({"devices": [None]}, ow.UnknownNameError), ({"devices": [5]}, ow.UnknownNameError),
    *[({"split": split}, ow.BoundsError) for split in (
        "1", 5, ["1"], [], [np.inf], [np.nan], [10**400], [-1], [0], [1e308]
    )],
    ({"devices": ["cpu", "host"], "split": [1e308, 1e308]}, ow.BoundsError),
    ({"memory": "20GiB"}, ow.SchedulerError), ({"memory": ["20GiB"]}, ow.SchedulerError),
    ({"memory": {"cpu": "9" * 400}}, ow.BoundsError), ({"repack": "9" * 400}, ow.BoundsError),
    ({"patterns": ["cpu"]}, ow.SchedulerError), ({"patterns": {5: "cpu"}}, ow.SchedulerError),
    ({"patterns": {"zzz": "nope"}}, ow.UnknownNameError), ({"experts": "nope"}, ow.UnknownNameError),
    ({"experts": 5}, ow.UnknownNameError),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error"), WRONG, ids=lambda value: str(value)[:40])
def test_plans_refuse_what_loading_refuses(path, options, error):
    for call in (models.plan_placement, models.load):
        with pytest.raises(error):
            call(models.open_model(path), **{"devices": "cpu", "context": 64, **options})


@pytest.mark.parametrize("options", [{"split": [1]}, {"split": [1], "memory": {"host": "1GiB"}}, {}])
def test_budgets_are_checked_whoever_names_a_device(path, options, monkeypatch):
    monkeypatch.setattr(placement, "_budget", lambda name: 10_000)
    with pytest.raises(ow.AllocationError):
        models.plan_placement(models.open_model(path), "cpu", context=64, patterns={"blk.0.*": "host"}, **options)


def test_terabytes_are_memory():
    assert [placement.parse_bytes(text) for text in ("1TiB", "2 tb", "1.5T", "3ti")] == [
        1 << 40, 2 * 10**12, 15 * 10**11, 3 << 40
    ]  # fmt: skip
