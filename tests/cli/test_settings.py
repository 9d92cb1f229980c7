"""The environment is read once: what is wrong in it is told at once, by name, without its secrets."""

from __future__ import annotations

import sys
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path

import pytest

from orchestrator.settings import Address, Settings, SettingsInvalid, names

DSN = "postgresql://waypost:hunter2@db/waypost"
KEY = "a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s="


def test_an_empty_environment_has_defaults_for_all_but_the_database_and_the_key() -> None:
    settings = Settings.from_environment({})

    assert settings.lease == timedelta(seconds=30)
    assert settings.receiver_addr == Address("127.0.0.1", 8081)
    assert settings.receiver_url == "http://127.0.0.1:8081"
    assert settings.source == "/waypost"
    assert settings.data_dir == Path(".waypost")
    with pytest.raises(SettingsInvalid, match=r"WAYPOST_DATABASE_URL: expected .* found none"):
        settings.dsn()
    with pytest.raises(SettingsInvalid, match="WAYPOST_SECRET_KEY: expected 32 bytes"):
        settings.vault()


def test_every_name_is_read() -> None:
    settings = Settings.from_environment(
        {
            "WAYPOST_DATABASE_URL": DSN,
            "WAYPOST_LISTEN_URL": DSN + "?application_name=direct",
            "WAYPOST_SECRET_KEY": KEY,
            "WAYPOST_FLOWS": "shop.flows, shop.more,",
            "WAYPOST_LEASE": "2s",
            "WAYPOST_ALLOW_ADDRESSES": "10.0.0.0/8,::1/128",
            "WAYPOST_DATA_DIR": "/var/lib/waypost",
            "WAYPOST_SOURCE": "https://waypost.example/",
            "WAYPOST_RECEIVER_URL": "https://in.example/waypost/",
            "WAYPOST_RECEIVER_ADDR": "[::1]:0",
            "WAYPOST_API_ADDR": "0.0.0.0:80",
            "WAYPOST_HEALTH_ADDR": "localhost:81",
            "WAYPOST_TRACE_SEGMENT_GAP": "15m",
        }
    )

    assert settings.dsn() == DSN
    assert settings.listen_dsn().endswith("direct")
    assert settings.flows == ("shop.flows", "shop.more")
    assert settings.lease == timedelta(seconds=2)
    assert settings.allow_addresses == (ip_network("10.0.0.0/8"), ip_network("::1/128"))
    assert settings.source == "https://waypost.example"
    assert settings.receiver_url == "https://in.example/waypost"
    assert settings.receiver_addr == Address("::1", 0)
    assert str(settings.receiver_addr) == "[::1]:0"
    assert settings.api_addr == Address("0.0.0.0", 80)
    assert settings.health_addr == Address("localhost", 81)
    assert settings.trace_segment_gap == timedelta(minutes=15)


@pytest.mark.parametrize("name", names())
def test_each_name_has_a_file_twin(name: str, tmp_path: Path) -> None:
    values = {
        "WAYPOST_DATABASE_URL": DSN,
        "WAYPOST_LISTEN_URL": DSN,
        "WAYPOST_SECRET_KEY": KEY,
        "WAYPOST_PAYLOAD_KEYS": f"new:{KEY}",
        "WAYPOST_PAYLOAD_STORE": "file:///var/lib/waypost",
        "WAYPOST_CHANGED_FLOWS": "accept",
        "WAYPOST_LEASE": "7s",
        "WAYPOST_TRACE_SEGMENT_GAP": "15m",
        "WAYPOST_ALLOW_ADDRESSES": "10.0.0.0/8",
        "WAYPOST_RECEIVER_URL": "https://in.example",
    }
    value = values.get(name, "127.0.0.1:9" if name.endswith("ADDR") else "other")
    (tmp_path / "value").write_text(value + "\n")

    by_file = Settings.from_environment({f"{name}_FILE": str(tmp_path / "value")})

    assert by_file == Settings.from_environment({name: value})
    assert by_file != Settings.from_environment({})


def test_all_faults_are_told_at_once_and_by_name() -> None:
    with pytest.raises(SettingsInvalid) as found:
        Settings.from_environment(
            {
                "WAYPOST_LEASE": "5",
                "WAYPOST_ALLOW_ADDRESSES": "everywhere",
                "WAYPOST_RECEIVER_ADDR": "8081",
                "WAYPOST_SOURCE": "not a uri",
                "WAYPOST_FLOWS": "shop/flows.py",
                "WAYPOST_RECEIVER_URL": "ftp://in.example",
                "WAYPOST_PAYLOAD_STORE": "file://there/../waypost",
                "WAYPOST_API_ADDR_FILE": "/nowhere",
            }
        )

    told = {problem.split(":")[0] for problem in found.value.problems}
    assert told == {
        "WAYPOST_LEASE",
        "WAYPOST_ALLOW_ADDRESSES",
        "WAYPOST_RECEIVER_ADDR",
        "WAYPOST_SOURCE",
        "WAYPOST_FLOWS",
        "WAYPOST_RECEIVER_URL",
        "WAYPOST_PAYLOAD_STORE",
        "WAYPOST_API_ADDR",
    }
    assert all("expected" in problem for problem in found.value.problems)


@pytest.mark.parametrize("text", ["0s", "999ms", "11m", "1d", "-1s", "1.5s", " 2s", "٣s", "9999999999s"])
def test_a_lease_out_of_range_is_a_fault(text: str) -> None:
    with pytest.raises(SettingsInvalid, match="WAYPOST_LEASE: expected"):
        Settings.from_environment({"WAYPOST_LEASE": text})


def test_a_value_here_and_in_a_file_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "lease").write_text("2s")

    with pytest.raises(SettingsInvalid, match="found both"):
        Settings.from_environment({"WAYPOST_LEASE": "2s", "WAYPOST_LEASE_FILE": str(tmp_path / "lease")})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("file:///var/lib/way%20post", "file:///var/lib/way%20post"),
        ("s3://bucket", "s3://bucket/"),
        ("s3://my.bucket/of/waypost/", "s3://my.bucket/of/waypost"),
    ],
)
def test_a_payload_store_is_a_folder_or_a_bucket(
    text: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    store = Settings.from_environment({"WAYPOST_PAYLOAD_STORE": text}).objects()
    assert store is not None
    assert store.name == name


@pytest.mark.parametrize(
    "text",
    ["file://host/a", "file:///", "file:///a/../b", "file:///a/%2e%2e/b", "s3://B", "s3://hunter2:key@bucket/a",
     "s3://bucket/a?hunter2", "/var/lib", "http://[", "s3://bucket/a%0ab"],
)  # fmt: skip
def test_what_is_no_payload_store_is_a_fault(text: str) -> None:
    with pytest.raises(
        SettingsInvalid, match="WAYPOST_PAYLOAD_STORE: expected file:///FOLDER or s3:"
    ) as found:
        Settings.from_environment({"WAYPOST_PAYLOAD_STORE": text})
    assert "hunter2" not in str(found.value)


def test_a_bucket_without_its_extra_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orchestrator.objects.buckets", None)
    with pytest.raises(SettingsInvalid, match=r"expected waypost\[s3\] to be installed"):
        Settings.from_environment({"WAYPOST_PAYLOAD_STORE": "s3://bucket/a"}).objects()


@pytest.mark.parametrize(
    "name",
    ["WAYPOST_DATABASE_URL", "WAYPOST_SECRET_KEY", "WAYPOST_PAYLOAD_KEYS", "WAYPOST_PAYLOAD_STORE"],
)
def test_a_fault_never_repeats_a_secret(name: str) -> None:
    with pytest.raises(SettingsInvalid) as found:
        Settings.from_environment({name: "hunter2"})

    assert name in str(found.value)
    assert "hunter2" not in str(found.value)


def test_settings_show_no_secret() -> None:
    settings = Settings.from_environment({"WAYPOST_DATABASE_URL": DSN, "WAYPOST_SECRET_KEY": KEY})

    assert "hunter2" not in repr(settings)
    assert KEY not in repr(settings)


def test_what_a_stranger_wrote_is_escaped() -> None:
    with pytest.raises(SettingsInvalid) as found:
        Settings.from_environment({"WAYPOST_LEASE": "\x1b[31m2s"})

    assert "\x1b" not in str(found.value)
