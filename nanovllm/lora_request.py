"""How a request names an adapter; the names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.errors import RequestError, quoted


@dataclass(frozen=True)
class LoRARequest:
    """An adapter in PEFT's format. Raises RequestError for values that name none."""

    lora_name: str  # for people
    lora_int_id: int  # a number of its own for each adapter, from 1
    # A local directory with adapter_config.json and adapter_model.safetensors. When its files have changed, later
    # requests use the new ones.
    lora_path: str = ""
    base_model_name: str | None = None  # that the server reports as the adapter's parent
    tensorizer_config_dict: None = None  # vLLM's
    load_inplace: bool = False  # the id may have belonged to another path before

    def __post_init__(self) -> None:
        rules = {
            "lora_name": (_is_text(self.lora_name), "must be text that is not empty"),
            "lora_int_id": (
                type(self.lora_int_id) is int and 0 < self.lora_int_id < 2**63,
                "must be a whole number of at least 1",
            ),
            "lora_path": (_is_text(self.lora_path), "must be the path of a directory, as text"),
            "base_model_name": (self.base_model_name is None or _is_text(self.base_model_name), "must be None or text"),
            "tensorizer_config_dict": (self.tensorizer_config_dict is None, "only safetensors are read: leave it out"),
            "load_inplace": (isinstance(self.load_inplace, bool), "must be True or False"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise RequestError(f"LoRARequest: {name}={quoted(getattr(self, name))}: {rule}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value
