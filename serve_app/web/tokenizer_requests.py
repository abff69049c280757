"""What clients send to `/tokenize` and `/decode`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from serve_app.web.fields import Constraint, Fields, MaybeNoIds, Prompt, Text, TokenIds, one_or_many


class TokenizeRequest(Fields):
    """TEI's `POST /tokenize`."""

    inputs: Text | Annotated[list[Text], Constraint("a list of strings", "max_inputs")]
    add_special_tokens: bool = True
    prompt_name: Prompt = None
    """Which of the model's prompts is put before each input. Null: the default, if there is one."""

    @property
    def texts(self) -> Sequence[str]:
        return one_or_many(self.inputs)


class DecodeRequest(Fields):
    """TEI's `POST /decode`."""

    ids: (
        TokenIds | Annotated[list[MaybeNoIds], Constraint("a list of such lists", "max_inputs", not_first=(int, float))]
    )
    skip_special_tokens: bool = True

    @property
    def id_lists(self) -> Sequence[Sequence[int]]:
        return one_or_many(self.ids)
