import timeit

import pytest

from deployments.admission.fair_share import Tenant
from deployments.errors import SettingsError, Unauthorized
from deployments.settings import Settings
from serve_app.api_keys import ApiKey, ApiKeys, bearer, read_keys

KEYS = ("sk-one", "sk-two", "Z29v/ZA+._~==")


def accepts(keys, key):
    try:
        keys.check(None if key is None else f"Bearer {key}")
    except Unauthorized:
        return False
    return True


@pytest.mark.parametrize("key", [None, "", "sk-", "sk-onee", "SK-ONE", "sk-one,sk-two", "é", "\udcff", "x" * 10**6])
def test_nothing_else_is(key):
    assert not accepts(ApiKeys(KEYS), key)
    assert not accepts(ApiKeys(()), key)


def test_many_keys_take_no_longer_than_one():
    def seconds(count):
        keys = ApiKeys(f"sk-{number}" for number in range(count))
        return min(timeit.repeat(lambda: accepts(keys, "sk-0"), number=20))

    assert seconds(10_000) < 10 * seconds(1)


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (None, None),
        ("", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("Basic c2stb25l", None),
        ("sk-one", None),
        ("Bearersk-one", None),
        ("Bearer sk-one", "sk-one"),
        ("bearer  sk-one ", "sk-one"),
        ("BEARER sk-one", "sk-one"),
    ],
)
def test_the_header(header, key):
    assert bearer(header) == key


@pytest.mark.parametrize(
    ("header", "sentence"), [(None, "requires an API key"), ("Bearer sk-1", "is not valid for this")]
)
def test_who_is_turned_away_is_told_why_and_no_key(header, sentence):
    with pytest.raises(Unauthorized, match=sentence) as refused:
        ApiKeys(KEYS).check(header)
    assert "sk-" not in refused.value.message


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys"


def test_keys_from_a_file(file):
    file.write_text("# ours\nsk-one\n\n  sk-two  \r\n  # theirs\nZ29v/ZA+._~==\n")
    assert read_keys(f"file:{file}") == tuple(map(ApiKey, KEYS))


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        (" sk-one,sk-two Z29v/ZA+._~==,\n", [ApiKey(key) for key in KEYS]),
        ("search: sk-one weight=3, batch: sk-two", [ApiKey("sk-one", "search", 3.0), ApiKey("sk-two", "batch")]),
    ],
)
def test_keys_from_the_environment(monkeypatch, content, keys):
    monkeypatch.setenv("WINDVE_KEYS", content)
    assert list(read_keys("env:WINDVE_KEYS")) == keys


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file"),
        ("", "holds no key"),
        ("# nothing\n\n", "holds no key"),
        ("sk-one\nsecret word\n", "line 2 of "),
        ("sécret", "line 1 of "),
        (b"\xff\xfe", "is not UTF-8 text"),
        ("\n\nsearch:", "line 3 of .*the key cannot be sent"),
        ("search: sk-secret wieght=2", "line 1 of .*after the key, use weight="),
        ("search: sk-secret weight=0", "each with a number above 0"),
        ("search: sk-secret weight=inf", "each with a number above 0"),
        ("search: sk-secret weight", "each with a number above 0"),
        ("search: sk-secret sk-secret", "after the key, use weight="),
        ("sk-secret weight=2", "the key cannot be sent"),
        ("sk secret: x", "the name before the colon"),
        ("a: sk-secret tokens_per_minute=1 device_seconds_per_second=1", "a key can have only one quota"),
        ("a: sk-one\n\na: sk-secret weight=2", "line 3 of .*an earlier line has the same name but other options"),
        ("a: sk-secret\nb: sk-secret", "line 2 of .*an earlier line has the same key under another name"),
    ],
)
def test_bad_keys_are_refused_by_their_line_and_not_shown(file, content, problem):
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingsError, match=problem) as refused:
        read_keys(f"file:{file}")
    assert str(refused.value).startswith("args.api_keys: ")
    assert not any(secret in str(refused.value) for secret in ("sk-", "secret", "cret"))


def test_keys_are_read_anew_and_bad_files_change_nothing(file, caplog):
    caplog.set_level("INFO")
    file.write_text("sk-one\nsk-two\n")
    keys = ApiKeys.read(f"file:{file}")

    def refreshed(content):
        """What is said of a file with this content (None: it is gone) that is looked at three times."""
        caplog.clear()
        file.unlink() if content is None else file.write_text(content)
        for _ in range(3):
            keys.refresh()
        return [record.message for record in caplog.records]

    (bad,) = refreshed("")
    assert bad.endswith("holds no key; the previous keys stay in force")
    assert refreshed("sk-two\nsk-three\n") == [f"reloaded the API keys from file:{file}: 2 are in force"]
    assert [accepts(keys, key) for key in ("sk-one", "sk-two", "sk-three")] == [False, True, True]
    assert refreshed("sk-two\nsk-three\n") == []
    for content in ("", "two words\n", None, ""):
        (bad,) = refreshed(content)
        assert "the previous keys stay in force" in bad
        assert "words" not in bad
        assert accepts(keys, "sk-three")
    assert refreshed("sk-two\nsk-three\n") == []
    assert len(refreshed("")) == 1  # it is said anew after a good one


def test_a_variable_that_is_not_there(monkeypatch):
    monkeypatch.delenv("WINDVE_KEYS", raising=False)
    with pytest.raises(SettingsError, match="--api-keys: the environment variable WINDVE_KEYS is not set"):
        read_keys("env:WINDVE_KEYS", "--api-keys")


WHERE = "should say where the keys are, file:PATH or env:NAME"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        *((key, WHERE) for key in ("sk-secret", "secret:x", "file:", "env:", ["sk-secret"], 12345)),
        ("file:keys.txt", "file: needs an absolute path"),  # it would be another file on another node
    ],
)
def test_a_key_in_the_config_is_refused_and_not_shown(given, sentence):
    with pytest.raises(SettingsError) as refused:
        Settings.parse({"model": {"id": "x"}, "api_keys": given})
    assert str(refused.value).startswith(f"args.api_keys: {sentence}")
    assert "secret" not in str(refused.value)
    assert "12345" not in str(refused.value)


NAMED = """\
# who may ask
search: sk-one weight=3
batch:  sk-two  weight=0.5 tokens_per_minute=60000
batch:  sk-new  weight=0.5 tokens_per_minute=60000
lab: sk-three device_seconds_per_second=0.25
sk-four
"""


def test_keys_have_names_weights_and_quotas(file):
    file.write_text(NAMED)
    keys = ApiKeys.read(f"file:{file}")
    search, batch, new, lab, nobody = (
        keys.check(f"Bearer {key}") for key in ("sk-one", "sk-two", "sk-new", "sk-three", "sk-four")
    )
    assert (search.tenant, search.quota) == (Tenant("search", 3.0), None)
    assert batch is new
    assert (batch.tenant, batch.quota.per_s, batch.quota.unit) == (Tenant("batch", 0.5), 1000.0, "tokens")
    assert (lab.tenant, lab.quota.per_s, lab.quota.unit) == (Tenant("lab", 1.0), 0.25, "device_seconds")
    assert nobody.tenant == Tenant("unnamed")
    assert "sk-" not in repr(read_keys(f"file:{file}"))


def test_without_names_nobody_is_told_apart():
    assert ApiKeys(KEYS).check("Bearer sk-one") is None


def test_who_keeps_its_quota_keeps_what_it_has_used_of_it(file):
    file.write_text(NAMED)
    keys = ApiKeys.read(f"file:{file}")
    before = keys.check("Bearer sk-two")
    file.write_text(NAMED.replace("weight=3", "weight=4"))
    keys.refresh()
    assert keys.check("Bearer sk-one").tenant.weight == 4
    assert keys.check("Bearer sk-two").quota is before.quota
    file.write_text(NAMED.replace("60000", "6000"))
    keys.refresh()
    assert keys.check("Bearer sk-two").quota.per_s == 100
