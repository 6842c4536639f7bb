"""FlexKVConfig: which source wins, what names and sizes are accepted, what an error says."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from flexkv.compat import ALIASES, DEAD, parse_size
from flexkv.config import ConfigWarning, FlexKVConfig
from flexkv.errors import ConfigError
from flexkv.model import KVSpec

SPEC = KVSpec.uniform(layers=2, heads=2, head_size=64, dtype="bf16", tokens_per_block=16)
DOCS = Path(__file__).parent.parent / "docs" / "configuration.md"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("FLEXKV_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        (" 32 GiB ", 32 * 2**30),
        ("32G", 32 * 2**30),
        ("32g", 32 * 2**30),
        ("32GB", 32 * 10**9),
        ("1.5KiB", 1536),
        ("0.1TiB", 109951162777),
        (2.0, 2),
        ("7B", 7),
        ("1e3", None),
        ("-1", None),
        (-1, None),
        (True, None),
        ("", None),
        ("many", None),
        (None, None),
        (float("nan"), None),
        (float("inf"), None),
    ],
)
def test_sizes(text: object, size_bytes: int | None) -> None:
    if size_bytes is None:
        with pytest.raises(ValueError, match="not a size"):
            parse_size(text)
    else:
        assert parse_size(text) == size_bytes


def test_large_sizes_are_exact() -> None:
    assert parse_size(str(2**60 + 1)) == 2**60 + 1
    assert parse_size("1048577KiB") == 1048577 * 1024


def test_keyword_beats_file_beats_environment_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_HOST_CACHE_BYTES", "1MiB")
    monkeypatch.setenv("FLEXKV_PLAN_TTL_MS", "11")
    monkeypatch.setenv("FLEXKV_SPILL", "never")
    file = tmp_path / "flexkv.yaml"
    file.write_text("host_cache_bytes: 2MiB\nplan_ttl_ms: 22\n")
    config = FlexKVConfig.load(file, host_cache_bytes="3MiB")
    assert config.host_cache_bytes == 3 * 2**20
    assert config.plan_ttl_ms == 22
    assert config.spill == "never"
    assert config.evict_ratio == 0.0


def test_the_same_setting_under_two_names_in_two_sources_is_one_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_CPU_CACHE_GB", "3")
    assert FlexKVConfig().host_cache_bytes == 3 * 2**30
    file = tmp_path / "flexkv.json"
    file.write_text(json.dumps({"cpu_cache_gb": 2}))
    assert FlexKVConfig.load(file).host_cache_bytes == 2 * 2**30
    assert FlexKVConfig.load(file, host_cache_bytes=4096).host_cache_bytes == 4096


def test_config_path_variable_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "a.yml", tmp_path / "b.json"
    first.write_text("model: from-a")
    second.write_text('{"model": "from-b"}')
    monkeypatch.setenv("FLEXKV_CONFIG_PATH", str(first))
    assert FlexKVConfig().model == "from-a"
    assert FlexKVConfig.load().model == "from-a"
    assert FlexKVConfig.load(second).model == "from-b"


def test_upstream_names_keep_their_meaning() -> None:
    config = FlexKVConfig(
        cpu_cache_gb=2,
        ssd_cache_gb="0.5",
        ssd_cache_dir="a; b;",
        use_hugepage_cpu_buffer=False,
        iouring_entries=512,
        eviction_policy="slru",
        hit_reward_seconds=7,
        slru_protected_threshold=3,
        evict_ratio=0.1,
        evict_start_threshold=0.7,
    )
    assert config.host_cache_bytes == 2 * 2**30
    assert config.disk_cache_bytes == 2**29
    assert config.disk_dirs == (Path("a"), Path("b"))
    assert config.huge_pages is False
    assert config.disk_queue_depth == 512
    assert config.disk_engine == "auto"
    assert config.policy_of("host") == config.policy_of("disk") == "slru"
    settings = config.policy_settings()
    assert settings["hit_reward_seconds"] == 7
    assert settings["slru_protected_threshold"] == 3
    assert FlexKVConfig(iouring_entries=0).disk_engine == "threads"
    assert FlexKVConfig(ssd_cache_dir=["x", "y"]).disk_dirs == (Path("x"), Path("y"))


def test_upstream_refused_a_disk_smaller_than_memory_we_do_not() -> None:
    assert FlexKVConfig(cpu_cache_gb=4, ssd_cache_gb=1).disk_cache_bytes == 2**30


@pytest.mark.parametrize("name", sorted(DEAD))
def test_dead_names_warn_once_with_the_reason(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FlexKVConfig(**{name: "1"})
    assert [item.category for item in caught] == [ConfigWarning]
    assert name in str(caught[0].message)
    assert DEAD[name] in str(caught[0].message)
    assert caught[0].filename == __file__


def test_dead_names_in_the_environment_warn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_ENABLE_MPS", "1")
    with pytest.warns(ConfigWarning, match="environment: 'enable_mps' has no effect"):
        FlexKVConfig.load()


def test_no_name_is_both_alive_and_dead() -> None:
    ours = set(FlexKVConfig.model_fields)
    assert not ours & set(DEAD)
    assert not ours & set(ALIASES)
    assert not set(ALIASES) & set(DEAD)


def test_gds_is_accepted_and_says_that_it_is_not_there() -> None:
    with pytest.warns(ConfigWarning, match="not in this build"):
        assert FlexKVConfig(enable_gds=True).enable_gds
    FlexKVConfig(enable_gds=False)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"host_cache_byte": 1}, "did you mean host_cache_bytes"),
        ({"cpu_cache_gbs": 1}, "did you mean cpu_cache_gb"),
        ({"qqq": 1}, "docs/configuration.md"),
        ({"spill": "sometimes"}, "spill: .*'through', 'on_evict' or 'never'.*sometimes"),
        ({"evict_ratio": 2}, "evict_ratio: .*less than or equal to 1.*got 2"),
        ({"host_cache_bytes": "lots"}, "host_cache_bytes: 'lots' is not a size"),
        ({"host_cache_bytes": 0}, "host_cache_bytes: .*greater than 0"),
        ({"host_cache_bytes": 1, "cpu_cache_gb": 1}, "both set host_cache_bytes"),
        ({"disk_dirs": "a;a"}, "twice"),
        ({"disk_dirs": ""}, "disk_dirs"),
        ({"plan_ttl_ms": 0}, "plan_ttl_ms"),
        ({"tokens_per_block": 8, "spec": SPEC}, "tokens_per_block is 8, but spec says 16"),
        ({"tokens_per_block": "x", "spec": {"layers": 1, "heads": 1, "head_size": 1}}, "integer"),
        ({"spec": {"layers": 2}}, "heads"),
        ({"spec": {"layers": 2, "heads": 1, "head_size": 1, "colour": 1}}, "colour"),
        ({"spec": {"groups": [{"layers": [0], "heads": 0, "head_size": 1}]}}, "heads must be"),
        ({"spec": 5}, "mapping"),
        ({"config_path": "/does/not/exist.yaml"}, "No such file"),
    ],
)
def test_errors_say_what_is_wrong(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        FlexKVConfig(**settings)


def test_unknown_variable_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_HOST_CACHE_BYTE", "1")
    with pytest.raises(ConfigError, match=r"environment.*did you mean host_cache_bytes"):
        FlexKVConfig()


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "\x00", "1: 2", "just text"])
def test_files_that_are_no_settings(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        FlexKVConfig.load(file)


def test_an_empty_file_means_defaults(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")
    assert FlexKVConfig.load(file).host_cache_bytes == FlexKVConfig().host_cache_bytes


def test_the_secret_is_never_shown() -> None:
    config = FlexKVConfig(key_secret="hunter2-hunter2")
    assert config.secret_bytes() == b"hunter2-hunter2"
    for text in (repr(config), str(config), config.model_dump_json()):
        assert "hunter2" not in text
    with pytest.raises(ConfigError) as caught:
        FlexKVConfig(key_secret=["hunter2"])
    assert "hunter2" not in str(caught.value)


def test_spec_from_mapping_text_and_upstream_names(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"layers": 2, "heads": 2, "head_size": 64}
    theirs = {"num_layers": 2, "num_kv_heads": 2, "head_size": 64, "kv_dim": 2, "dtype": "bf16"}
    grouped = {"groups": [{"layers": [0, 1], "heads": 2, "head_size": 64}]}
    for spec in (ours, theirs, grouped, SPEC):
        assert FlexKVConfig(spec=spec).spec == SPEC
    monkeypatch.setenv("FLEXKV_SPEC", json.dumps(ours))
    monkeypatch.setenv("FLEXKV_TOKENS_PER_BLOCK", "32")
    config = FlexKVConfig()
    assert config.spec is not None
    assert config.spec.tokens_per_block == config.tokens_per_block == 32
    assert FlexKVConfig(spec={**ours, "tokens_per_block": 4}, tokens_per_block=4).spec is not None


def test_slots_follow_from_sizes() -> None:
    config = FlexKVConfig(host_cache_bytes=10 * SPEC.stride_bytes + 1, disk_cache_bytes="1MiB")
    assert config.host_slots(SPEC) == 10
    assert config.store_slots(SPEC) == {"disk": 2**20 // SPEC.stride_bytes}
    assert FlexKVConfig().store_slots(SPEC) == {}
    with pytest.raises(ConfigError, match="one block takes"):
        FlexKVConfig(host_cache_bytes=SPEC.stride_bytes - 1).host_slots(SPEC)
    with pytest.raises(ConfigError, match="disk_cache_bytes"):
        FlexKVConfig(disk_cache_bytes=1).store_slots(SPEC)


def test_identity_tells_caches_apart() -> None:
    base = FlexKVConfig(model="m").identity(SPEC).digest()
    for change in (
        {"model": "n"},
        {"revision": "2"},
        {"rank": "tp1/2,pp0/1"},
        {"key_hash": "sha256"},
    ):
        assert FlexKVConfig(**{"model": "m", **change}).identity(SPEC).digest() != base
    with pytest.raises(ConfigError, match="set model"):
        FlexKVConfig(disk_cache_bytes="1GiB").identity(SPEC)
    with pytest.raises(ConfigError, match="the device holds"):
        FlexKVConfig(spec=KVSpec.uniform(1, 1, 1)).identity(SPEC)


def test_policies_per_tier() -> None:
    config = FlexKVConfig(eviction_policy="lfu", disk_policy="fifo", policy_options={"seed": 1})
    assert (config.policy_of("host"), config.policy_of("disk")) == ("lfu", "fifo")
    assert config.policy_settings()["seed"] == 1


def test_instances_do_not_change() -> None:
    config = FlexKVConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.spill = "never"


def shown_default(name: str) -> str:
    """How docs/configuration.md writes the default of a setting."""
    field = FlexKVConfig.model_fields[name]
    value = getattr(FlexKVConfig(), name)
    if name == "key_secret" or value is None or value in ("", {}):
        return "none"
    if name == "disk_dirs":
        return f"`{';'.join(map(str, value))}`"
    for unit, size_bytes in (("GiB", 2**30), ("MiB", 2**20)):
        if "_bytes" in name and field.annotation is int and value and not value % size_bytes:
            return f"`{value // size_bytes}{unit}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


@pytest.mark.parametrize("name", list(FlexKVConfig.model_fields))
def test_every_setting_is_documented_with_its_default(name: str) -> None:
    description = FlexKVConfig.model_fields[name].description
    assert f"| `{name}` | {shown_default(name)} | {description} |" in DOCS.read_text()


def test_every_upstream_name_is_documented() -> None:
    text = DOCS.read_text()
    missing = [name for name in (*ALIASES, *DEAD) if f"`{name}`" not in text]
    assert missing == []


def test_every_reason_is_documented() -> None:
    text = DOCS.read_text()
    assert [reason for reason in set(DEAD.values()) if reason not in text] == []
