"""Judge exported files in a process that has torch and nothing of the package.

    python -P alone.py '{"files": [...], "reference": ..., "init": [...], "device": "cpu", ...}'

prints one JSON line: for each file what is wrong with it, and what ran. It executes the files as
the public harness does: in the namespace of the reference, with a line put before.
"""

import contextlib
import copy
import json
import os
import sys
import traceback
import warnings

import torch

LIMIT = 2e-7  # of the relative error, or twice eager's own


class NoPackage:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "workbook":
            raise ImportError(f"{name} was imported")
        return None


def loaded(file, reference):
    """(Model, ModelNew, the namespace): the reference's, in which the file was then executed."""
    space = {}
    with open(reference, encoding="utf-8") as text:
        exec(compile(text.read(), "<string>", "exec"), space)
    before = {name: space[name] for name in ("Model", "get_inputs", "get_init_inputs")}
    with open(file, encoding="utf-8") as text:
        exec(compile("import os\n" + text.read(), "<string>", "exec"), space)
    for name, was in before.items():
        assert space[name] is was, f"{name} of the reference was replaced"
    return space["Model"], space["ModelNew"], space


def twins(Model, ModelNew, init, seed, device):
    """One of each after the same seed: same parameters, same state of the generator."""
    made = []
    for kind in (Model, ModelNew):
        torch.manual_seed(seed)
        made.append((kind(*init), torch.random.get_rng_state()))
    (model, drawn), (new, drawn_new) = made
    assert torch.equal(drawn, drawn_new), "draws: other ones than the reference's"
    there, ours = model.state_dict(), new.state_dict()
    assert list(there) == list(ours), f"state_dict: {list(ours)}, wants {list(there)}"
    assert all(torch.equal(there[k], ours[k]) for k in there), "parameters: other ones"
    return model.to(device), new.to(device)


def vary(model, new, seed):
    """The same weights in both, none at its initial value."""
    torch.manual_seed(seed)
    state = {
        k: torch.rand_like(v) + 0.5 if "var" in k else v + 0.1 * torch.randn_like(v)
        for k, v in model.state_dict().items()
        if v.is_floating_point()
    }
    state = model.state_dict() | state
    model.load_state_dict(state, strict=True)
    new.load_state_dict(state, strict=True)
    model.load_state_dict(new.state_dict(), strict=True)


def errors(y, truth):
    """Relative errors: the whole, the worst row."""
    y, truth = y.double().reshape(len(y), -1), truth.reshape(len(truth), -1)
    rows = (y - truth).norm(dim=1) / truth.norm(dim=1).clamp_min(1e-300)
    return ((y - truth).norm() / truth.norm()).item(), rows.max().item()


def expect_right(model, new, x, when):
    """Outputs by the rule, gradients and buffers as the reference's; x and generator untouched."""
    exact = copy.deepcopy(model).double()(x.double())
    found = []
    for one in (model, new):
        given, drawn = x.clone().requires_grad_(), torch.random.get_rng_state()
        y = one(given)
        assert torch.equal(given, x), f"{when}: x was changed"
        assert torch.equal(drawn, torch.random.get_rng_state()), f"{when}: a call draws"
        weigh = torch.linspace(0.5, 1.5, y.numel(), device=y.device, dtype=y.dtype).view(y.shape)
        one.zero_grad()
        (y * weigh).sum().backward()
        found.append((y.detach(), [given.grad, *(p.grad for p in one.parameters())]))
    (y, grads), (ours, our_grads) = found
    assert (ours.shape, ours.dtype, ours.device) == (y.shape, y.dtype, y.device), f"{when}: kind"
    for eager, error in zip(errors(y, exact), errors(ours, exact), strict=True):
        assert error <= max(2 * eager, LIMIT), f"{when}: error {error:.1e}, eager's {eager:.1e}"
    noise = 1e-7
    if hasattr(model, "bn"):  # its scale and, in training, the bias before it: sums that cancel
        noise += 1e-6 * max(p.grad.abs().sum().item() for p in model.bn.parameters())
    for grad, our in zip(grads, our_grads, strict=True):
        assert (grad is None) == (our is None), f"{when}: gradients are missing"
        if grad is not None:
            scale = grad.abs().max().item()
            assert torch.allclose(grad, our, rtol=1e-4, atol=1e-4 * scale + noise), f"{when}: grads"
    for name, buffer in model.named_buffers():
        ours = dict(new.named_buffers())[name]
        assert torch.allclose(buffer, ours, rtol=1e-5, atol=1e-6), f"{when}: buffer {name}"


def judge(Model, ModelNew, init, batch, device):
    for training in (True, False):
        for seed in (0, 1):
            model, new = twins(Model, ModelNew, init, seed, device)
            model.train(training), new.train(training)
            mode = "train" if training else "eval"
            x = torch.rand(batch, init[0]).to(device)
            expect_right(model, new, x, f"{mode}, as drawn")
            vary(model, new, seed)
            expect_right(model, new, x, f"{mode}, another state loaded")
            with torch.no_grad():
                for one in (model, new):
                    next(one.parameters()).mul_(1.5)
            expect_right(model, new, x, f"{mode}, weights edited in place")
            # a fused optimizer writes without moving the version counter of a tensor
            steps = [torch.optim.SGD(one.parameters(), 1e-3, fused=True) for one in (model, new)]
            for step in steps:
                step.step()
            expect_right(model, new, x + 0.25, f"{mode}, after a step")
    new.load_state_dict(model.state_dict())  # after a step each has its own rounding
    y = new.double()(x.double())
    assert y.dtype == torch.float64, "float64: another dtype"
    assert errors(y, model.double()(x.double()))[0] < 1e-12, "float64: error"


def kernels_of(new, x):
    """The names of our built ops that a call runs; in eval mode, for a small batch in training is
    left to the reference on a GPU."""
    new.eval()
    with torch.autograd.profiler.profile() as profile, torch.no_grad():
        new(x)
    return sorted({e.name for e in profile.function_events if e.name.startswith("wb_")})


def libraries():
    folder = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "workbook")
    return (
        sorted(f for f in os.listdir(folder) if f.endswith(".so")) if os.path.isdir(folder) else []
    )


def main(job):
    sys.meta_path.insert(0, NoPackage())
    found = []
    for file in job["files"]:
        said, kernels, space = "", [], {}
        with warnings.catch_warnings(record=True) as told, contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("always")
            try:
                Model, ModelNew, space = loaded(file, job["reference"])
                built = libraries()
                judge(Model, ModelNew, job["init"], job["batch"], job["device"])
                new = ModelNew(*job["init"]).to(job["device"])
                kernels = kernels_of(
                    new, torch.rand(job["batch"], job["init"][0]).to(job["device"])
                )
                assert libraries() == built, "built after import"
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                traceback.print_exc()
        ours = [str(w.message) for w in told if "ModelNew" in str(w.message)]
        found.append(
            {"said": said, "kernels": kernels, "warnings": ours, "space": space.get("NAMESPACE")}
        )
    print(json.dumps({"files": found, "package": "workbook" in sys.modules}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
