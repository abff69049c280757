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


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_accepted(key):
    assert accepts(ApiKeys(KEYS), key)


@pytest.mark.parametrize("key", [None, "", "sk-", "sk-onee", "SK-ONE", "sk-one,sk-two", "é", "\udcff", "x" * 10**6])
def test_nothing_else_is(key):
    assert not accepts(ApiKeys(KEYS), key)
    assert not accepts(ApiKeys(()), key)


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


@pytest.mark.parametrize(("header", "sentence"), [(None, "wants an API key"), ("Bearer sk-1", "is not one of this")])
def test_who_is_turned_away_is_told_why_and_no_key(header, sentence):
    with pytest.raises(Unauthorized, match=sentence) as refused:
        ApiKeys(KEYS).check(header)
    assert "sk-" not in refused.value.message


def test_keys_from_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-one\n\n  sk-two  \r\n  # theirs\nZ29v/ZA+._~==\n")
    assert tuple(one.key for one in read_keys(f"file:{file}")) == KEYS


def test_keys_from_the_environment(monkeypatch):
    monkeypatch.setenv("WINDVE_KEYS", " sk-one,sk-two Z29v/ZA+._~==,\n")
    assert tuple(one.key for one in read_keys("env:WINDVE_KEYS")) == KEYS


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file"),
        (b"", "holds no key"),
        (b"# nothing\n\n", "holds no key"),
        (b"sk-one\nsecret word\n", "line 2 of "),
        ("schlüssel".encode(), "line 1 of "),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_bad_files_are_refused_by_name_and_without_a_key(tmp_path, content, problem):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=problem) as refused:
        read_keys(f"file:{file}")
    assert str(refused.value).startswith("args.api_keys: ")
    assert not any(secret in str(refused.value) for secret in ("sk-one", "secret", "schl"))


def test_keys_are_read_anew_and_bad_files_change_nothing(tmp_path, caplog):
    caplog.set_level("INFO")
    file = tmp_path / "keys"
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
    assert bad.endswith("holds no key; the keys before stay in force")
    assert refreshed("sk-two\nsk-three\n") == [f"API keys read anew from file:{file}: 2 are in force"]
    assert [accepts(keys, key) for key in ("sk-one", "sk-two", "sk-three")] == [False, True, True]
    assert refreshed("sk-two\nsk-three\n") == []
    for content in ("", "two words\n", None, ""):
        (bad,) = refreshed(content)
        assert "the keys before stay in force" in bad
        assert "words" not in bad
        assert accepts(keys, "sk-three")
    assert refreshed("sk-two\nsk-three\n") == []
    assert len(refreshed("")) == 1  # it is said anew after a good one


def test_a_variable_that_is_not_there(monkeypatch):
    monkeypatch.delenv("WINDVE_KEYS", raising=False)
    with pytest.raises(SettingsError, match="--api-keys: there is no environment variable WINDVE_KEYS"):
        read_keys("env:WINDVE_KEYS", "--api-keys")


@pytest.mark.parametrize("given", ["sk-secret", "secret:x", "file:", "env:", ["sk-secret"], 12345])
def test_a_key_in_the_config_is_refused_and_not_shown(given):
    with pytest.raises(SettingsError) as refused:
        Settings.parse({"model": {"id": "x"}, "api_keys": given})
    assert str(refused.value).startswith("args.api_keys: should say where the keys are, file:PATH or env:NAME")
    assert "secret" not in str(refused.value)
    assert "12345" not in str(refused.value)


def test_a_path_that_means_another_file_on_another_node_is_refused():
    with pytest.raises(SettingsError, match=r"args\.api_keys: file: needs a whole path"):
        Settings.parse({"model": {"id": "x"}, "api_keys": "file:keys.txt"})


NAMED = """\
# who may ask
search: sk-one weight=3
batch:  sk-two  weight=0.5 tokens_per_minute=60000
batch:  sk-new  weight=0.5 tokens_per_minute=60000
lab: sk-three device_seconds_per_second=0.25
sk-four
"""


def test_keys_have_names_weights_and_quotas(tmp_path):
    file = tmp_path / "keys"
    file.write_text(NAMED)
    keys = ApiKeys.read(f"file:{file}")
    search, batch, new, lab, nobody = (
        keys.check(f"Bearer {key}") for key in ("sk-one", "sk-two", "sk-new", "sk-three", "sk-four")
    )
    assert (search.tenant, search.quota) == (Tenant("search", 3.0), None)
    assert batch is new
    assert (batch.tenant, batch.quota.per_s, batch.quota.unit) == (Tenant("batch", 0.5), 1000.0, "tokens")
    assert (lab.tenant.weight, lab.quota.per_s, lab.quota.unit) == (1.0, 0.25, "device_seconds")
    assert nobody.tenant == Tenant("unnamed")
    assert "sk-" not in repr(read_keys(f"file:{file}"))


def test_a_name_alone_has_the_weight_of_one_and_no_quota():
    client = ApiKeys([ApiKey("sk-one", "search")]).check("Bearer sk-one")
    assert (client.tenant, client.quota) == (Tenant("search", 1.0), None)


def test_without_names_nobody_is_told_apart():
    assert ApiKeys(KEYS).check("Bearer sk-one") is None


def test_named_keys_in_a_variable(monkeypatch):
    monkeypatch.setenv("WINDVE_KEYS", "search: sk-one weight=3, batch: sk-two")
    assert [(one.name, one.weight) for one in read_keys("env:WINDVE_KEYS")] == [("search", 3.0), ("batch", 1.0)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("search:", "the key cannot be sent"),
        ("search: sk-secret wieght=2", "after the key come weight="),
        ("search: sk-secret weight=0", "each with a number above 0"),
        ("search: sk-secret weight=inf", "each with a number above 0"),
        ("search: sk-secret weight", "each with a number above 0"),
        ("search: sk-secret sk-secret", "after the key come weight="),
        ("sk-secret weight=2", "the key cannot be sent"),
        ("sk secret: x", "the name before the colon"),
        ("a: sk-secret tokens_per_minute=1 device_seconds_per_second=1", "a key has one quota"),
        ("first: sk-secret weight=2", "a line before has the same name, other options"),
        ("second: sk-one", "a line before has the same key, another name"),
    ],
)
def test_a_bad_line_is_named_and_no_key_shown(tmp_path, line, problem):
    file = tmp_path / "keys"
    file.write_text(f"first: sk-one\n\n{line}\n")
    with pytest.raises(SettingsError, match=f"line 3 of .*{problem}") as refused:
        read_keys(f"file:{file}")
    assert "secret" not in str(refused.value)


def test_who_keeps_its_quota_keeps_what_it_has_used_of_it(tmp_path):
    file = tmp_path / "keys"
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
