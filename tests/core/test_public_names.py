"""The public names, frozen: adding or removing one is a decision, made here."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import pytest

import opweave
import opweave.contract

NAMES = """
    DTYPES
    AllocationError Arg Backend Blocks BoundsError Broken Buffer BufferType Cancelled CheckpointError DType DTypeError
    Device DeviceLostError ExecutionError FormatError Function GradientError Graph Group HazardError Incompatible
    KVCache KernelTable Kind LayoutError LifetimeError MemorySpace NameConflict OpDef OpweaveError OpweaveWarning
    PathError Placement PluginError PluginRecord Program Registry Scheduler SchedulerError ShapeError Sharded Spec
    Step Stream Tensor ThreadPool Unavailable UnknownNameError UnsupportedOpError Usage Weights abs accumulate acos
    acosh add add_expert add_region arange argmax argsort as_dtype asin asinh assign atan atanh attention avg_pool1d
    avg_pool2d backend backends bernoulli best_device broadcast_to cast causal_conv1d ceil clamp col2im
    compile concat constant contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d copy cos cosh
    count_equal cross_entropy cumsum custom default_devices define_op dequantize device devices dft diag diag_embed
    diagonal div elu embedding equal erf exp expand_dims expert_linear expm1 flatten flip floor from_dlpack full
    gated_delta_rule gated_linear_attention geglu gelu gelu_quick gelu_tanh gradients greater greater_equal group_norm
    hadamard_transform hardsigmoid hardswish hookimpl im2col index_add index_copy indexer_scores input interpolate
    l2_norm layer_norm leaky_relu less less_equal linear linear_attention load load_all load_all_from_path
    load_weights log log1p log_softmax matmul max max_pool1d max_pool2d maximum mean min minimum mse_loss mul neg
    normal not_equal open_device optional outer pad place plugins pow prod quantize read reciprocal recompute register
    register_device reglu relu repeat rescan reshape rms_norm roll rope round rsqrt rwkv6 rwkv7 scale scope
    selective_scan set_region set_rows sigmoid sign silu sin sinh sinkhorn softmax softplus solve_triangular split
    sqrt square squeeze state step sub sum swapaxes swiglu swiglu_oai take_along_axis tan tanh tile timestep_embedding
    top_k transpose tril triu trunc uniform unload var weights where write xielu
""".split()  # noqa: SIM905 - sixty lines shorter

CONTRACT_NAMES = """
    HOST_SPACE NEVER VERSION
    Arg Backend Buffer BufferType Call Caps CollectiveSupport Collectives Device DeviceProps Event Features Group Kind
    Launch Limit Limits MemorySpace MultiBuffer Offloading Plan Range Rows SetThreads Single Step StepError Stream
    Structure Tunable Usage WorkerStream
    check_threads first_equals flat_rows flops mapped pointwise_groups structure_of
""".split()  # noqa: SIM905

MODULES = [(opweave, NAMES), (opweave.contract, CONTRACT_NAMES)]


@pytest.mark.parametrize(("module", "names"), MODULES, ids=lambda v: getattr(v, "__name__", ""))
def test_the_public_names_are_these(module: ModuleType, names: list[str]):
    assert list(module.__all__) == names, "constants first, then classes, then functions; each in order of the alphabet"
    missing = [name for name in names if not hasattr(module, name)]
    assert not missing


def test_no_public_name_is_also_a_module():
    # `opweave.scale` the function would hide `opweave.scale` the module, or the other way round, by order of import.
    modules = {info.name for info in pkgutil.iter_modules(opweave.__path__)}
    assert {"graph", "registry"} <= modules
    assert not modules & set(opweave.__all__)
    for name in opweave.__all__:
        assert not isinstance(getattr(opweave, name), ModuleType)


def test_names_of_the_contract_mean_one_thing():
    for name in set(opweave.__all__) & set(opweave.contract.__all__):
        assert getattr(opweave, name) is getattr(opweave.contract, name)


@pytest.mark.parametrize(
    "name", ["errors", "graph.dtypes", "contract.kernels", "runtime.host", "runtime.host.operands"]
)
def test_modules_for_authors_say_what_is_public(name: str):
    module = importlib.import_module(f"opweave.{name}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert not [name for name in module.__all__ if name.startswith("_")]


def test_every_public_function_and_class_is_documented():
    for name in opweave.__all__:
        value = getattr(opweave, name)
        if callable(value):
            assert value.__doc__, name


@pytest.mark.parametrize("name", ["conformance.", "conformance.compare", "training.", "cost.tune", "models.col2im1d"])
def test_what_became_a_package_of_its_own_is_named(name: str):
    package, _, member = name.partition(".")
    name, home = member or package, f"opweave_{package}{member and '.'}{member}"
    said = rf"opweave\.{name} is {home} now: pip install .*{package}"
    with pytest.raises(AttributeError, match=said):
        getattr(opweave, name)
