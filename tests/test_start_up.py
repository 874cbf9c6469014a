"""Start-up: the shortcuts agree with the libraries that they replace."""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_cases import QUICK
from transformers import CONFIG_MAPPING

from nanovllm.errors import ModelError
from nanovllm.models import families
from nanovllm.models.family import Family, complete_config

# ---- defaults of configs


@pytest.mark.parametrize("family", families.FAMILIES.values(), ids=lambda family: family.model_type)
@given(data=st.data())
@settings(QUICK, max_examples=15)
def test_configs_are_completed_as_by_transformers(family: Family, data: st.DataObject) -> None:
    values: dict[str, st.SearchStrategy[Any]] = {
        "num_hidden_layers": st.integers(1, 9),
        "num_attention_heads": st.sampled_from([1, 4, 8]),
        "num_key_value_heads": st.sampled_from([None, 1, 2]),
        "hidden_size": st.sampled_from([64, 96]),
        "head_dim": st.sampled_from([None, 16]),
        "use_sliding_window": st.booleans(),
        "sliding_window": st.sampled_from([None, 5]),
        "max_window_layers": st.integers(0, 4),
        "layer_types": st.none() | st.lists(st.just("full_attention"), max_size=4),
        "sliding_window_pattern": st.integers(1, 4),
        "full_attention_interval": st.integers(1, 4),
        "num_experts": st.integers(1, 4),
        "num_local_experts": st.integers(1, 4),
        "mlp_only_layers": st.none() | st.just([1]),
        "eos_token_id": st.sampled_from([None, 3, [3, 4]]),
    }
    known = {name: value for name, value in values.items() if family.reads(name)}
    heads = {"num_attention_heads": known.pop("num_attention_heads")}  # hidden_size is a multiple of them
    fields = data.draw(st.fixed_dictionaries(heads, optional=known))
    if "num_experts" in fields:  # the engine refuses a config with two counts
        fields.pop("num_local_experts", None)
    config_class = CONFIG_MAPPING[family.model_type]
    types = get_type_hints(config_class, localns={"torch": torch})
    # Where Transformers wants a number, the engine takes null for a missing one.
    may_be_none = {name for name in fields if NoneType in get_args(types.get(name, int | None))}
    fields = {name: value for name, value in fields.items() if value is not None or name in may_be_none}
    try:
        theirs = config_class(**fields)
    except Exception:  # its validators raise many types
        with pytest.raises(ModelError):
            complete_config(family, fields)
        return
    own = complete_config(family, fields)
    theirs.allow_global_per_layer_attribute_access = True  # of a Gemma 4, whose head sizes test_gemma4.py compares
    theirs.head_dim = getattr(theirs, "head_dim", None) or own.head_dim
    left_out = {"sliding_window_pattern", "full_attention_interval"}
    left_out |= {"layer_types"} if getattr(theirs, "layer_types", 0) is None else set()
    left_out |= {"intermediate_size"} if not own.intermediate_size else set()  # all layers have experts
    of_layers = {"global_head_dim", "num_global_key_value_heads", "per_layer_config", "full_head_dim", "full_kv_heads"}
    names = vars(own).keys() - left_out - of_layers
    assert {name: getattr(own, name) for name in names} == {name: getattr(theirs, name) for name in names}
    thetas = theirs.default_theta
    both = thetas if isinstance(thetas, dict) else dict.fromkeys(("global", "local"), thetas)
    assert both == {"global": family.theta, "local": family.local_theta or family.theta}


def test_every_family_has_its_defaults() -> None:
    """A field that a family reads and Transformers has is in the table, so that no attribute is missing later."""
    for family in families.FAMILIES.values():
        theirs = CONFIG_MAPPING[family.model_type]()
        own = complete_config(family, {"head_dim": 128})
        others = {"architectures", "model_type", "rope_parameters", "dtype", "num_local_experts"}
        fields = {name for name in theirs.to_dict() if family.reads(name)} - others
        assert fields <= vars(own).keys(), family.model_type
