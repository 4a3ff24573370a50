"""Matrix products on a share of a GPU are looked at; here with a multiplication that is wrong on purpose."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from rollart.model import products
from rollart.model.products import prove_products, wrong_product

WEIGHTS = [torch.randn(96, 64), torch.randn(64, 300)]


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ROWS", (1, 7, 33))


def test_right_products_pass() -> None:
    assert wrong_product(WEIGHTS) == ""


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_one_that_is_wrong_for_some_number_of_rows_is_named(bad: float) -> None:
    def multiply(left: Tensor, right: Tensor) -> Tensor:
        found = linear(left, right)
        return torch.full_like(found, bad) if left.shape == (7, 300) else found

    assert wrong_product(WEIGHTS, multiply) == "a product of (7, 300) and (300, 64)"


def test_a_wrong_gradient_is_seen_too() -> None:
    def multiply(left: Tensor, right: Tensor) -> Tensor:
        found = linear(left, right)
        return 2 * found if left.shape == (96, 33) else found

    assert wrong_product(WEIGHTS, multiply) == "a product of (96, 33) and (33, 64)"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_share_on_which_products_are_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(products.LIMIT_VARIABLE, "36")
    monkeypatch.setattr(products, "wrong_product", lambda weights: "a product")
    with pytest.raises(Exception, match=r"with 36 % .* a product comes out wrong"):
        prove_products(weight.cuda() for weight in WEIGHTS)


def test_without_a_share_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(products.LIMIT_VARIABLE, raising=False)
    prove_products(pytest.fail("looked at") for _ in range(1))
