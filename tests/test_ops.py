"""Which kernel an op takes, and in which form: a fold, flags and files of its own for a place.

A small op with made-up kernels, of which none is built; tensors of a GPU are stood in for.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kit import needs_nvcc
from torch import Tensor

from workbook import build, cli, export, ops, paths, precision, split, toolchain, variants, ways
from workbook.chains import SLUGS, gemm_batchnorm_scale_softmax_run, problem
from workbook.chains import matmul_avgpool_gelu_scale_max as avgpool
from workbook.chains import matmul_maxpool_sum_scale as maxpool

ON_GPU = SimpleNamespace(is_cuda=True)  # all that `place` looks at
WITH_A_PRODUCT = [  # ops that have a form for Hopper
    avgpool.OP,
    maxpool.OP,
    gemm_batchnorm_scale_softmax_run.EVAL,
    gemm_batchnorm_scale_softmax_run.TRAIN,
]


def doubled(run, x: Tensor, parameters: tuple, folded: tuple, options: tuple) -> Tensor:
    return run(x, *folded, *options)


def op_of(name: str, suits=None, kernels: dict | None = None) -> ops.FusedOp:
    """y = factor * sum(weight) * x, with a form for each place."""
    forms = {
        "plainly": ops.Form(doubled, ("-DWB_CPU",)),
        "portable": ops.Form(doubled, ("-DWB_PORTABLE",)),
        "special": ops.Form(
            doubled,
            ("-DWB_SPECIAL",),
            fold=lambda dtype, weight: (weight.sum(dtype=dtype), weight.max().to(dtype)),
            suits=suits,
        ),
    }
    return ops.FusedOp(
        "placed",
        "(Tensor x, Tensor weight, float factor) -> Tensor",
        fold=lambda dtype, weight: (weight.sum(dtype=dtype),),
        plain=lambda x, total, factor: factor * total * x,
        reference=lambda x, weight, factor: factor * weight.sum() * x,
        output=lambda x, weight, factor: torch.empty_like(x),
        arguments=lambda model: (model.weight, 2.0),
        forms=forms,
        kernels=kernels
        or {
            "cpu": ops.Kernel("plainly", ("cpu.cpp",)),
            "cuda": ops.Kernel("portable", ("portable.cu",)),
            "hopper": ops.Kernel("special", ("tail.cu",), ("shared/shared.cu",)),
        },
        name=f"placed_{name}",
        fold_options=0,
    )


def asked(x: object, weight: object, factor: float) -> bool:
    raise AssertionError("a form for Hopper was asked about a tensor of a CPU")


ASKED = op_of("asked", asked)


# --- the place --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (2048, 8192)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_on_a_cpu_the_place_is_the_cpu(shape, dtype):
    x = torch.empty(shape, dtype=dtype)
    assert ASKED.place(x, torch.empty(5, shape[1]), 1.0) == "cpu"
    assert ASKED.place(x.T, torch.empty(5, shape[0]), 1.0) == "cpu"


def test_on_a_gpu_the_form_decides_by_all_that_the_op_takes():
    told = []
    op = op_of("decides", lambda *given: told.append(given) or given[2] > 1)
    assert op.place(ON_GPU, "weight", 2.0) == "hopper"
    assert op.place(ON_GPU, "weight", 1.0) == "cuda"
    assert told == [(ON_GPU, "weight", 2.0), (ON_GPU, "weight", 1.0)]


def test_an_op_without_a_form_for_hopper_has_the_portable_one_there():
    kernels = {name: ops.Kernel("portable", ("portable.cu",)) for name in ("cpu", "cuda")}
    assert op_of("without", asked, kernels).place(ON_GPU, "weight", 2.0) == "cuda"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("op", WITH_A_PRODUCT, ids=lambda op: str(op.op))
def test_ops_of_the_chains_stay_on_the_cpu(op):
    assert op.place(torch.empty(1024, 8192), *parameters_of(op)) == "cpu"


def of_gpu(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    shape, strides = (rows, columns), (columns, 1)
    return SimpleNamespace(
        shape=shape, dtype=dtype, is_cuda=True, get_device=lambda: 0,
        size=shape.__getitem__, stride=strides.__getitem__,
    )  # fmt: skip


@pytest.fixture
def hopper(monkeypatch) -> None:
    monkeypatch.setattr(split, "_processors", lambda index: 132)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("x", "outputs", "serves"),
    [
        (of_gpu(1024, 8192), 8192, True),
        (of_gpu(128, 32768), 16384, True),
        (of_gpu(1024, 8192), 512, True),
        (of_gpu(64, 512), 512, False),
        (of_gpu(ways.LEAST[0] - 1, 8192), 8192, False),
        (of_gpu(1024, ways.LEAST[1] - 1), 8192, False),
        (of_gpu(1024, 8192), ways.LEAST[2] - 1, False),
        (of_gpu(1024, 8192, torch.float64), 8192, False),
        (of_gpu(1024, 8192, torch.bfloat16), 8192, False),
        (of_gpu(0, 8192), 8192, False),
    ],
)
def test_the_product_of_halves_serves_where_it_is_faster(x, outputs, serves):
    assert split.suits(x, outputs) == serves


@pytest.mark.usefixtures("hopper")
def test_where_it_is_faster_hangs_on_the_route():
    many_rows = of_gpu(16384, 8192)
    assert split.suits(many_rows, 512) and not split.suits(many_rows, 512, "tf32")
    with precision.using_route("tf32"):
        assert not split.suits(many_rows, 512) and split.suits(many_rows, 512, "float32")


@pytest.mark.usefixtures("hopper")
def test_ways_that_can_not_be_taken_do_not_count():
    """By TF32 few outputs are faster than torch's as they are alone: with W, by whole 16 bytes."""
    assert split.suits(of_gpu(1024, 8192), 512, "tf32", whole=True)
    assert not split.suits(of_gpu(1024, 8192), 512, "tf32")
    assert not split.suits(of_gpu(1024, 8190), 512, "tf32", whole=True)
    assert not split.suits(of_gpu(1024, 8192), 512, "tf32", whole=True, centred=True)


def test_it_serves_where_a_gpu_and_the_user_let_it(monkeypatch):
    for processors, route, serves in ((132, "float32", True), (132, "tf32", True),
                                      (0, "float32", False)):  # fmt: skip
        monkeypatch.setattr(split, "_processors", lambda index, count=processors: count)
        with precision.using_route(route):
            assert split.suits(of_gpu(1024, 8192), 8192) == serves


def parameters_of(op: ops.FusedOp) -> tuple:
    """Of a large layer (8192, 8192), and options."""
    weight = torch.empty(8192, 8192, device="meta")
    options = (2, 1.0) if op in (avgpool.OP, maxpool.OP) else (1e-5,)
    return weight, *(torch.empty(8192, device="meta") for _ in range(op.parameters - 1)), *options


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("op", WITH_A_PRODUCT, ids=lambda op: str(op.op))
def test_ops_of_the_chains_take_it_where_it_serves(op):
    given = parameters_of(op)
    assert op.place(of_gpu(1024, 8192), *given) == "hopper"
    assert op.place(of_gpu(2, 8192), *given) == "cuda", "too small"
    with precision.using_route("tf32"):
        assert op.place(of_gpu(1024, 8192), *given) == "hopper"
    for pool in (1, 3) if op is maxpool.OP else ():  # nothing is halved
        assert op.place(of_gpu(1024, 8192), *given[:2], pool, 1.0) == "cuda"


# --- the kernel of a place --------------------------------------------------------------------


@pytest.fixture
def builds(monkeypatch) -> list[tuple]:
    """What is asked of `built`, whose ops add up what they get."""
    asked: list[tuple] = []

    def built(name: str, device: str, files: tuple, flags: tuple = ()):
        asked.append((name, device, tuple(files), tuple(flags)))
        return lambda x, total, *others: x * total + sum(others)

    monkeypatch.setattr(ops, "built", built)
    return asked


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        ("cpu", ("placed", "cpu", ("cpu.cpp",), ("-DWB_CPU",))),
        ("cuda", ("placed", "cuda", ("portable.cu",), ("-DWB_PORTABLE",))),
        # its own files are portable: what needs the architecture is in shared ones
        ("hopper", ("placed", "cuda", ("tail.cu",), ("-DWB_SPECIAL",))),
    ],
)
def test_a_kernel_is_built_with_its_form_s_flags_once(place, wanted, builds):
    op = op_of(f"once_{place}", lambda *given: True)
    assert op.kernel(place) is op.kernel(place)
    assert builds == [wanted]


def test_where_a_form_is_not_taken_nothing_of_it_is_built(builds):
    op = op_of("untaken", asked)
    x, weight = torch.ones(2, 3), torch.tensor([1.0, 2.0])
    assert torch.equal(op(x, weight, 0.5), torch.full((2, 3), 3.5))
    assert [device for _, device, *_ in builds] == ["cpu"]


@pytest.mark.parametrize(("place", "wanted"), [("cuda", 3.5), ("hopper", 5.5)])
def test_the_form_of_the_place_is_called_on_its_own_fold(place, wanted, builds, monkeypatch):
    """`place` said it: the kernel and the form of that place run."""
    op = op_of(f"called_{place}", lambda *given: True)
    monkeypatch.setattr(op, "place", lambda x, *arguments: place)
    x, weight = torch.ones(2, 3), torch.tensor([1.0, 2.0])
    assert torch.equal(op(x, weight, 0.5), torch.full((2, 3), wanted))
    assert [device for _, device, *_ in builds] == ["cuda"]


def test_a_place_without_a_compiler_runs_the_algebra(monkeypatch):
    op = op_of("lacking", lambda *given: True)
    monkeypatch.setattr(ops, "built", lambda *library: None)
    monkeypatch.setattr(op, "place", lambda x, *arguments: "hopper")
    x, weight = torch.ones(2, 3), torch.tensor([1.0, 2.0])
    assert torch.equal(op(x, weight, 0.5), torch.full((2, 3), 1.5))


# --- folds of forms ---------------------------------------------------------------------------


def test_folds_of_two_forms_are_kept_beside_each_other():
    op = op_of("folds")
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    special = op.forms["special"]
    given = torch.float32, weight, 1.0
    for _ in range(2):  # made, then found
        assert [t.item() for t in op.folded(*given)] == [3.0]
        assert [t.item() for t in op.folded(*given, form=op.forms["portable"])] == [3.0]
        assert [t.item() for t in op.folded(*given, form=special)] == [3.0, 2.0]
    assert op.folded(*given, form=special)[0] is op.folded(*given, form=special)[0]
    with torch.no_grad():
        weight.mul_(2)
    assert [t.item() for t in op.folded(*given, form=special)] == [6.0, 4.0]
    assert [t.item() for t in op.folded(*given)] == [6.0]


# --- kernels that are there -------------------------------------------------------------------


@pytest.mark.parametrize("op", WITH_A_PRODUCT, ids=lambda op: str(op.op))
def test_a_form_for_hopper_says_where_it_is_taken_and_names_files_that_are_there(op):
    kernel = op.kernels["hopper"]
    assert op.forms[kernel.form].suits is not None
    assert kernel.shared
    files = [f"{op.slug}/{name}" for name in kernel.files]
    assert [f for f in (*files, *kernel.shared) if not (paths.kernels() / f).is_file()] == []


@pytest.mark.parametrize("slug", SLUGS)
def test_rungs_for_hopper_show_the_shared_file_and_build_their_own(slug):
    p = problem(slug)
    found = [v for v in p.variants if v.implementation == "hopper"]
    assert bool(found) == any(op.slug == slug for op in WITH_A_PRODUCT)
    for v in found:
        assert v.devices == ("cuda",) and v.source in v.files
        assert v.source.parent.name != slug, "what the rung is about is shared"
        own = [file for file in v.files if file.parent.name == slug]
        assert own and set(v.files) <= set(p.variant("fused").files)


@pytest.mark.parametrize("slug", sorted({op.slug for op in WITH_A_PRODUCT}))
def test_the_library_of_a_rung_for_hopper_is_of_its_own_files(slug, monkeypatch):
    """The shared ones have libraries of their own."""
    told = []
    monkeypatch.setattr(ops, "kernel_library", lambda *given, **how: told.append((given, how)))
    p = problem(slug)
    for v in (v for v in p.variants if v.implementation == "hopper"):
        variants.library_of(slug, v)
        ((named, device, files), how), told[:] = told[0], []
        assert (named, device, how["flags"]) == (slug, "cuda", v.flags)
        assert files and {file.parent for file in files} == {paths.kernels() / slug}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_command_builds_what_problems_share_as_it_is_asked_for(device, builds, monkeypatch):
    """Held against what exported files ask for, which is read from the calls themselves."""
    monkeypatch.setattr(
        variants, "library_of",
        lambda slug, v, verbose: SimpleNamespace(cached=True, seconds=0.0, digest=v.name),
    )  # fmt: skip
    assert cli.main(["build", SLUGS[0], "--device", device]) == 0
    exported = [export._libraries(export._merged(problem(slug), {}))[device] for slug in SLUGS]
    wanted = {library[:3] for found in exported for library in found if library[0] not in SLUGS}
    assert {library[:3] for library in builds} == wanted
    shared = {library[0]: library[1] for library in builds}
    if device == "cuda":
        assert shared["split_product"] == "hopper" and shared["split_rows"] == "cuda"


@needs_nvcc
def test_what_problems_share_compiles_for_its_kind():
    """That one for Hopper does not for the portable sm_90 is said in test_split."""
    for file in sorted(paths.kernels().glob("*/*.cu")):
        if file.stem == file.parent.name:
            arch = "90a" if ops.kind_of(file) == "hopper" else "80"
            include = [paths.kernels() / "common"]
            assert build.cubin(file, arch=arch, include=include, flags=["-DWB_CUDA"]).kernels


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("one.cpp", '#include "hopper.cuh"\n', "cpu"),
        ("one.cu", "int i;\n", "cuda"),
        ("one.cu", '#include "hopper.cuh"\n', "hopper"),
        ("one.cu", '#include "between.cuh"\n', "hopper"),
        ("one.cu", '#include "load.cuh"\n// hopper.cuh\n', "cuda"),
    ],
)
def test_the_kind_of_a_file_is_read_from_what_it_includes(name, text, kind, tmp_path):
    (tmp_path / "between.cuh").write_text('#include "split_gemm.cuh"\n')
    (tmp_path / name).write_text(text)
    assert ops.kind_of(tmp_path / name) == kind


def test_the_architecture_is_asked_of_nvcc_for_hopper_alone(monkeypatch):
    told = []
    monkeypatch.setattr(ops.build, "load", lambda name, sources, **how: told.append((name, how)))
    for device in ("cpu", "cuda", "hopper"):
        ops.kernel_library("column_sum", device, [])
    assert [name for name, _ in told] == [f"column_sum_{d}" for d in ("cpu", "cuda", "hopper")]
    assert [how["cuda"] for _, how in told] == [False, True, True]
    assert [how["cuda_flags"] for _, how in told] == [(), (), (toolchain.gencode("90a"),)]
    assert "90a" not in str(toolchain.device_flags())
