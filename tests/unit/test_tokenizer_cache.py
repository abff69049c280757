"""A tokenizer is asked once for the same files."""

import os

import pytest
from huggingface_hub import constants

from deployments.models.reference_tokenizer import OwnTokenizer, Question
from deployments.models.tokenizer_check import ask_once

ANSWER = OwnTokenizer("BertTokenizer", "{}")


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def asking(model):
    """Asks, and says what was answered and whether the tokenizer itself was asked."""

    def begin(answer=ANSWER, *, texts=(("a",),), trust_remote_code=False):
        asked = []
        question = Question(str(model), trust_remote_code, [*texts, ("a", "b")])
        found = ask_once(question, lambda question: asked.append(question) or answer)
        return found, bool(asked)

    return begin


def test_the_second_time_the_answer_is_the_kept_one(asking):
    assert asking() == (ANSWER, True)
    found, asked = asking("nobody asks")
    assert (found, asked) == (ANSWER, False)


def test_a_changed_file_or_question_is_asked_again(asking, model):
    asking()
    assert asking(texts=(("b",),))[1]
    os.utime(model / "tokenizer.json", (1, 1))
    assert asking()[1]
    (model / "added_tokens.json").write_text("{}")
    assert asking()[1]
    assert not asking()[1]


def test_a_problem_is_asked_again(asking):
    assert asking("transformers cannot") == ("transformers cannot", True)
    assert asking() == (ANSWER, True)


def test_answers_of_a_models_own_code_are_not_kept(asking):
    assert asking(trust_remote_code=True)[1]
    assert asking(trust_remote_code=True)[1]


def test_another_users_file_is_not_read(asking, monkeypatch):
    asking()
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    assert asking()[1]


def test_half_a_file_or_none_that_can_be_written_is_no_harm(asking, model, tmp_path):
    asking()
    (kept,) = (tmp_path / "home" / "windve" / "tokenizers").iterdir()
    kept.write_text(kept.read_text()[:20])
    assert asking() == (ANSWER, True)
    kept.unlink()
    kept.parent.rmdir()
    kept.parent.write_text("a file where the folder should be")
    assert asking() == (ANSWER, True)
