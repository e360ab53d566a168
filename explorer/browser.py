"""A headless Chromium, driven by selenium (``pip install selenium``), that no page can leave."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from smallnorb_novel_viewpoint import UserError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRIVERS = ("chromedriver", "chromium.chromedriver")


class NoBrowserError(UserError):
    """A browser, its driver or selenium is missing."""


def first_program(names: tuple[str, ...]) -> str:
    for name in names:
        if path := shutil.which(name):
            return path
    raise NoBrowserError(f"there is no {names[0]} on this machine: on Debian, apt-get install chromium chromium-driver")


def imported_selenium() -> Any:
    try:
        from selenium import webdriver
    except ImportError:
        raise NoBrowserError("selenium is missing: pip install selenium") from None
    return webdriver


@contextlib.contextmanager
def headless_browser(width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A selenium driver of an empty browser. No host but this machine is found, and the log of requests and of the
    console is kept. Raises NoBrowserError."""
    browser, driver_path = first_program(BROWSERS), first_program(DRIVERS)
    webdriver = imported_selenium()
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (
            "headless=new", "disable-gpu", "hide-scrollbars", "disable-dev-shm-usage", "no-first-run",
            "disable-background-networking", "disable-component-update", f"user-data-dir={profile}",
            "host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", f"window-size={width},{height}",
        ):
            options.add_argument(f"--{flag}")
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            options.add_argument("--no-sandbox")  # Chromium refuses to start as root with it
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
        try:
            driver.set_script_timeout(120)
            show_as(driver, width, height)
            yield driver
        finally:
            driver.quit()


def show_as(driver: Any, width: int, height: int, dark: bool = False) -> None:
    """Size of the window and colour scheme; below 600 pixels of width it is a telephone's. Pages are asked to do
    without motion: smooth scrolling would carry what is to be clicked away from the mouse."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1.0, "mobile": width < 600},
    )
    wishes = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in wishes.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
