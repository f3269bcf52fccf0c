"""Modules of dropout: torch's contract, and torch's generator as the only source of randomness."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedoptim.nn import AlphaDropout, Dropout, functional
from tests.compiling import needs_compiler, quiet_compiler
from tests.running import check_script


def model() -> torch.nn.Module:
    linears = torch.nn.Linear(20, 30), torch.nn.Linear(30, 7)
    dropouts = Dropout(0.3), Dropout(0.5), AlphaDropout(0.4)
    return torch.nn.Sequential(linears[0], dropouts[0], torch.nn.GELU(), *dropouts[1:], linears[1])


def trained(module: torch.nn.Module, x: Tensor, call: Any = None) -> list[Tensor]:
    """The output and all gradients of a forward and a backward pass."""
    module.zero_grad()
    y = call(x) if call else module(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def assert_equal(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second) > 1
    assert all(map(torch.equal, first, second))


class TestContract:
    def test_is_torchs_in_all_but_its_kernel(self) -> None:
        for cls, base in ((Dropout, torch.nn.Dropout), (AlphaDropout, torch.nn.AlphaDropout)):
            ours, torchs = cls(0.25, inplace=True), base(0.25, inplace=True)
            assert isinstance(ours, base)
            assert repr(ours) == repr(torchs)
            assert ours.state_dict() == {}

    def test_eval_and_zero_return_the_input(self) -> None:
        x = torch.randn(10)
        for cls in (Dropout, AlphaDropout):
            assert cls(0.5).eval()(x) is x
            assert cls(0.0)(x) is x
        assert functional.dropout(x, 0.5, training=False) is x
        assert functional.alpha_dropout(x, 0.5) is x

    def test_one_drops_all(self) -> None:
        for cls in (Dropout, AlphaDropout):
            assert torch.equal(cls(1.0)(torch.ones(10)), torch.zeros(10))

    def test_in_place(self) -> None:
        x = torch.ones(1000)
        version = x._version
        y = Dropout(0.5, inplace=True)(x)
        assert y is x
        assert x._version > version
        assert set(x.tolist()) == {0.0, 2.0}

    def test_alpha_dropout_in_place(self) -> None:
        """As in torch, the function can write into its input, and the module does not."""
        x = torch.ones(1000)
        for cls in (torch.nn.AlphaDropout, AlphaDropout):
            assert not torch.equal(cls(0.5, inplace=True)(x), x)
            assert torch.equal(x, torch.ones(1000))
        for function in (torch.nn.functional.alpha_dropout, functional.alpha_dropout):
            y = torch.ones(1000)
            assert function(y, 0.5, training=True, inplace=True) is y
            assert len(y.unique()) == 2

    def test_gradient_in_place(self) -> None:
        x = torch.randn(100, requires_grad=True)
        y = Dropout(0.5, inplace=True)(x * 1)
        y.sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(y, x * x.grad)

    def test_a_leaf_in_place_is_refused_as_by_torch(self) -> None:
        x = torch.ones(10, requires_grad=True)
        for cls in (torch.nn.Dropout, Dropout):
            with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
                cls(0.5, inplace=True)(x)

    @pytest.mark.parametrize("p", [-0.1, 1.5, math.nan])
    def test_p_out_of_range(self, p: float) -> None:
        """p is checked at each call, not only at construction, as modules let it be set."""
        for function in (functional.dropout, functional.alpha_dropout):
            with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1, "):
                function(torch.ones(3), p)
        for cls in (Dropout, AlphaDropout):
            if not math.isnan(p):  # torch's constructor accepts NaN
                with pytest.raises(ValueError, match="between 0 and 1"):
                    cls(p)
            module = cls()
            module.p = p
            with pytest.raises(ValueError, match="between 0 and 1"):
                module(torch.ones(3))

    @pytest.mark.parametrize("function", [functional.dropout, functional.alpha_dropout])
    def test_no_tensor(self, function: Any) -> None:
        """The error is torch's."""
        with pytest.raises(TypeError, match="must be Tensor, not list"):
            function([1.0], 0.5, True)

    def test_what_no_kernel_serves_is_torchs(self) -> None:
        x = torch.nested.nested_tensor([torch.ones(9), torch.ones(5)], layout=torch.jagged)
        torch.manual_seed(1)
        ours = Dropout(0.5)(x)
        torch.manual_seed(1)
        assert torch.equal(ours.values(), torch.nn.functional.dropout(x, 0.5).values())
        for dtype in (torch.complex64, torch.int64):
            for function in (functional.dropout, torch.nn.functional.dropout):
                with pytest.raises((RuntimeError, NotImplementedError)):
                    function(torch.ones(3, dtype=dtype), 0.5)

    def test_func_transforms_are_torchs(self) -> None:
        module, x = model(), torch.randn(3, 20)
        params = dict(module.named_parameters())
        plain = torch.nn.Sequential(*module)
        plain[1], plain[3] = torch.nn.Dropout(0.3), torch.nn.Dropout(0.5)
        plain[4] = torch.nn.AlphaDropout(0.4)

        def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(module, params, (x,)).square().sum()

        torch.manual_seed(1)
        gradients = torch.func.grad(loss)(params, x)
        torch.manual_seed(1)
        expected = torch.autograd.grad(plain(x).square().sum(), plain.parameters())
        torch.testing.assert_close(list(gradients.values()), list(expected))
        assert torch.func.vmap(module, randomness="different")(x).shape == (3, 7)

    @pytest.mark.filterwarnings("ignore:`torch.jit.script")
    def test_forward_mode_is_torchs(self) -> None:
        with torch.autograd.forward_ad.dual_level():
            x = torch.randn(100)
            dual = torch.autograd.forward_ad.make_dual(x, x)
            y, tangent = torch.autograd.forward_ad.unpack_dual(Dropout()(dual))
        assert tangent is not None
        assert torch.equal(y, tangent)

    def test_distributed_tensors_are_torchs(self) -> None:
        """DTensors use torch's operators, as ours have no rules for sharding."""
        check_script(
            """
            import warnings
            import torch
            import torch.distributed as dist
            from torch.distributed.tensor import DTensor, Shard, distribute_tensor
            from fusedoptim.nn import Dropout
            from fusedoptim.nn.functional import scaled_dot_product_attention
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            mesh = dist.init_device_mesh("cpu", (1,))
            warnings.filterwarnings("ignore", "DTensor random operators")
            x = distribute_tensor(torch.randn(2, 4, 8, 8), mesh, [Shard(1)]).requires_grad_()
            for y in (Dropout(0.5)(x), scaled_dot_product_attention(x, x, x, dropout_p=0.5)):
                assert isinstance(y, DTensor)
                y.sum().backward()
            dist.destroy_process_group()
            """
        )

    def test_deepcopy_and_pickle(self) -> None:
        module, x = model(), torch.randn(5, 20)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            torch.manual_seed(3)
            expected = trained(module, x)
            torch.manual_seed(3)
            assert_equal(trained(twin, x), expected)

    def test_saved_whole(self) -> None:
        file = io.BytesIO()
        torch.save(model(), file)
        file.seek(0)
        assert type(torch.load(file, weights_only=False)[1]) is Dropout


class TestGenerator:
    """All of torch's ways to repeat random numbers repeat the masks."""

    def test_manual_seed(self) -> None:
        module, x = model(), torch.randn(5, 20)
        torch.manual_seed(7)
        first, other = trained(module, x), trained(module, x)
        torch.manual_seed(7)
        assert_equal(trained(module, x), first)
        assert not torch.equal(first[0], other[0])

    def test_two_modules_draw_different_masks(self) -> None:
        x = torch.ones(1000)
        assert not torch.equal(Dropout(0.5)(x), Dropout(0.5)(x))

    def test_rng_state(self) -> None:
        module, x = model(), torch.randn(5, 20)
        state = torch.get_rng_state()
        first = trained(module, x)
        torch.set_rng_state(state)
        assert_equal(trained(module, x), first)

    def test_fork_rng(self) -> None:
        module, x = model(), torch.randn(5, 20)
        with torch.random.fork_rng():
            first = trained(module, x)
        assert_equal(trained(module, x), first)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpoint(self, use_reentrant: bool) -> None:
        """What is computed again in the backward pass has the same masks."""
        module, x = model(), torch.randn(5, 20, requires_grad=True)
        torch.manual_seed(7)
        expected = trained(module, x)
        torch.manual_seed(7)
        again = trained(module, x, lambda x: checkpoint(module, x, use_reentrant=use_reentrant))
        assert_equal(again, expected)

    def test_in_another_process(self) -> None:
        script = """
        import torch
        from fusedoptim.nn import Dropout
        torch.manual_seed(5)
        print(Dropout(0.5)(torch.ones(64)).tolist())
        """
        torch.manual_seed(5)
        assert check_script(script) == f"{Dropout(0.5)(torch.ones(64)).tolist()}\n"


@needs_compiler
@quiet_compiler
class TestCompiled:
    def test_whole_graph(self) -> None:
        """Seeds are the compiler's own random numbers then, which torch.manual_seed sets too."""
        module, x = model(), torch.randn(500, 20)
        compiled = torch.compile(module, fullgraph=True)
        torch.manual_seed(7)
        first = trained(module, x, compiled)
        assert not torch.equal(trained(module, x, compiled)[0], first[0])
        torch.manual_seed(7)
        assert_equal(trained(module, x, compiled), first)

    def test_rate_and_gradient(self) -> None:
        x = torch.ones(100_000, requires_grad=True)
        y = torch.compile(Dropout(0.1), fullgraph=True)(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, y)
        assert 0.09 < float((y == 0).float().mean()) < 0.11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    module, x = model(), torch.randn(50, 20)
    with torch.autocast("cpu", dtype):
        y = module(x)
    assert y.dtype == dtype
    y.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


def test_in_a_forked_process() -> None:
    """Dropout works in a child forked before the driver runs; later, the error says what to do."""
    script = """
    import torch
    from fusedoptim.nn import Dropout
    from tests.running import in_fork
    def works():
        Dropout(0.5)(torch.ones(3))
    def fails():
        try:
            Dropout(0.5)(torch.ones(3))
        except RuntimeError as error:
            assert "set_start_method('spawn')" in str(error)
        else:
            raise AssertionError
    in_fork(works)
    works()
    in_fork(fails)
    """
    check_script(script)
