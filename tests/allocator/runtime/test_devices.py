"""The table of devices."""

from __future__ import annotations

import xml.dom.minidom
from types import SimpleNamespace
from typing import Any

import pytest

import allocator
from allocator import Device, Devices
from allocator.runtime import devices as devices_module
from allocator.runtime import fork

GPU = Device("level_zero:gpu:0", "A <GPU> & more", "1.6.3", 16 << 30, ("device",), 32, False, True)


def test_the_cpu_is_what_its_queue_says() -> None:
    cpu = allocator.queue("cpu").sycl_device
    found = {device.filter_string: device for device in allocator.devices()}[cpu.filter_string]
    assert found.name == cpu.name.strip()
    assert found.driver == cpu.driver_version
    assert found.memory == cpu.global_mem_size
    assert found.units == cpu.max_compute_units
    assert found.has_float64 == cpu.has_aspect_fp64
    assert found.has_float16 == cpu.has_aspect_fp16


def test_every_device_and_kind_makes_a_pool() -> None:
    for device in allocator.devices():
        for kind in device.kinds:
            assert allocator.Pool(device.filter_string, kind).allocate(100).nbytes == 100


def test_text_is_a_table() -> None:
    header, row = repr(Devices([GPU])).splitlines()
    assert header.split()[:3] == ["device", "name", "driver"]
    assert [row.index(cell) for cell in ("A <GPU>", "1.6.3", "16 GiB", "device")] == [
        header.index(name) for name in ("name", "driver", "memory", "kinds")
    ]
    assert row.endswith("no       yes")


def test_html_is_a_table() -> None:
    text = Devices([GPU, GPU])._repr_html_()
    xml.dom.minidom.parseString(text)  # every tag is closed
    assert "A &lt;GPU&gt; &amp; more" in text
    assert text.count("<tr>") == 3


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    dpctl = SimpleNamespace(get_devices=list[Any])
    monkeypatch.setattr(devices_module, "load_dpctl", lambda: dpctl)
    none = allocator.devices()
    assert none == ()
    assert "no SYCL device" in repr(none)
    assert "no SYCL device" in none._repr_html_()


def test_in_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "_forked", True)
    with pytest.raises(RuntimeError, match="'spawn'"):
        allocator.devices()
