"""The zoo is sensitive: what a broken kernel would do to attention changes the tokens of stock itself."""

from __future__ import annotations

import pytest
import torch

from tests import zoo
from tests.oracle import differing_tokens, left_pad, ragged_prompts, solo

NEW = 12
PROMPTS = ragged_prompts(5, seed=11, shortest=20)
WITHIN_WINDOW = ragged_prompts(5, seed=12, shortest=2, longest=zoo.WINDOW)


def _share_changed(name: str, broken: torch.nn.Module) -> float:
    model = zoo.build(name)
    changed = sum(
        differing_tokens(solo(broken, ids, max_new_tokens=NEW), solo(model, ids, max_new_tokens=NEW)) > 0
        for ids in PROMPTS
    )
    return changed / len(PROMPTS)


@pytest.mark.parametrize("window", [zoo.WINDOW - 1, zoo.WINDOW + 1, 4096])
@pytest.mark.parametrize("name", zoo.WINDOWED)
def test_another_window_changes_most_rows(name: str, window: int) -> None:
    assert _share_changed(name, zoo.fresh(name, sliding_window=window)) > 0.5


def test_no_softcap_changes_most_rows() -> None:
    assert _share_changed("gemma2", zoo.fresh("gemma2", attn_logit_softcapping=None)) > 0.5


def test_no_sinks_change_most_rows() -> None:
    model = zoo.fresh("gpt_oss")
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("sinks"):
                parameter.fill_(-1e4)
    assert _share_changed("gpt_oss", model) > 0.5


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_the_first_token_of_a_prompt_matters(name: str) -> None:
    model = zoo.build(name)
    changed = 0
    for ids in WITHIN_WINDOW:
        other = [ids[0] % (zoo.VOCAB_SIZE - 1) + 1, *ids[1:]]
        changed += solo(model, ids, max_new_tokens=NEW) != solo(model, other, max_new_tokens=NEW)
    assert changed > len(WITHIN_WINDOW) / 2


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_no_near_ties(name: str) -> None:
    """Rounding can't turn a token: stock's two best logits are further apart than any order of summation moves them."""
    model = zoo.build(name)
    for ids in PROMPTS:
        input_ids, mask = left_pad([ids])
        out = model.generate(
            input_ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=NEW,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 2e-4


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_tokens_vary(name: str) -> None:
    """A model that repeats itself would hide wrong attention."""
    distinct = [len(set(solo(zoo.build(name), ids, max_new_tokens=NEW))) for ids in PROMPTS]
    assert sum(distinct) / len(distinct) > NEW / 2


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    torch.manual_seed(99)
    again = zoo.fresh(name)
    assert all(torch.equal(a, b) for a, b in zip(zoo.build(name).parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(zoo.fresh(name, seed=1).parameters()), next(again.parameters()))
