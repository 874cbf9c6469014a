"""vLLM's example of structured outputs, with only the import changed: on a tiny checkpoint, and on a real model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum

import pytest
from checkpoints import make_checkpoint
from tokenizer_files import CHAT_TEMPLATE, write_byte_level

from nanovllm import LLM, SamplingParams, StructuredOutputsParams

pydantic = pytest.importorskip("pydantic")
MAX_TOKENS = 160


class CarType(StrEnum):
    SEDAN = "sedan"
    SUV = "SUV"
    TRUCK = "Truck"


class CarDescription(pydantic.BaseModel):  # type: ignore[name-defined,misc]
    brand: str = pydantic.Field(max_length=8)
    model: str = pydantic.Field(max_length=8)
    car_type: CarType


SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("model")
    write_byte_level(path, chat_template=CHAT_TEMPLATE)
    make_checkpoint(path, vocab=290, eos_token_id=277)
    with LLM(model=str(path), max_model_len=256) as llm:
        yield llm


def generate_output(prompt: str, sampling_params: SamplingParams, llm: LLM) -> str:
    outputs = llm.generate(prompts=prompt, sampling_params=sampling_params, use_tqdm=False)
    return outputs[0].outputs[0].text


def test_the_example(llm: LLM) -> None:
    choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
    assert generate_output("Classify this sentiment: vLLM is wonderful!", choice, llm) in ("Positive", "Negative")

    email = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex=r"[a-z]{1,8}@\w{1,3}\.com\n"), stop=["\n"], max_tokens=50
    )
    found = generate_output("Generate an email address for Alan Turing. End in .com and new line.", email, llm)
    assert re.fullmatch(r"[a-z]{1,8}@.+\.com", found)

    car = SamplingParams(
        structured_outputs=StructuredOutputsParams(json=CarDescription.model_json_schema()), max_tokens=MAX_TOKENS
    )
    car.structured_outputs = StructuredOutputsParams(
        json=CarDescription, disable_any_whitespace=True, disable_additional_properties=True
    )
    CarDescription.model_validate_json(generate_output("Generate a JSON of the most iconic car of the 90's", car, llm))

    sql = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=SQL), max_tokens=100)
    found = generate_output(
        "Generate an SQL query to show the 'username' and 'email' from the 'users' table.", sql, llm
    )
    assert re.fullmatch(r"SELECT col_[12]  from table_[12]  where col_[12] = [12] ", found)
